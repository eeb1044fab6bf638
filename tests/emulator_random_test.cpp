// Random configurations on the emulator against the reference: shapes, ranks, tokens, routing and cuts of every kind,
// on poisoned memory and in two steps.
#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "support/emulated.h"

namespace moewave::test {
namespace {

class Dice {
 public:
  explicit Dice(std::uint32_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <typename T>
  T any(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<std::int64_t>(values.size()) - 1)];
  }

 private:
  std::mt19937 random_;
};

LayerShape random_shape(Dice& dice) {
  LayerShape shape = make_shape(8 * dice.any<std::int64_t>({1, 2, 3, 5, 16, 17, 33}),
                                8 * dice.any<std::int64_t>({1, 2, 3, 5, 16, 17, 33}),
                                dice.one_in(6) ? dice.between(17, 70) : dice.between(1, 16), 1);
  shape.topk = dice.between(1, std::min<std::int64_t>(16, shape.experts));
  if (dice.one_in(3)) shape.shared_intermediate = 8 * dice.any<std::int64_t>({1, 3, 17, 33});
  if (dice.one_in(3)) shape.clamp = 0.49f;
  if (dice.one_in(3)) shape.shared_clamp = 0.71f;
  return shape;
}

Tokens random_tokens(Dice& dice) {
  Tokens tokens(static_cast<std::size_t>(dice.between(1, 6)));
  for (std::int64_t& count : tokens) count = dice.one_in(4) ? 0 : dice.between(1, dice.one_in(3) ? 200 : 40);
  return tokens;
}

LayerCase random_layer(Dice& dice, std::uint64_t seed) {
  const LayerShape shape = random_shape(dice);
  const std::string routing = dice.one_in(3) ? "zipf:1.5" : (dice.one_in(5) ? "single:0" : "uniform");
  LayerCase c = random_case(shape, random_tokens(dice), seed, routing);
  if (dice.one_in(3))
    mask_routes(c, static_cast<std::uint32_t>(dice.any<std::int64_t>({5, 50, 95})), static_cast<std::uint32_t>(seed));
  if (dice.one_in(3)) {
    for (std::size_t i = 1; i < c.batch.topk_ids.size(); ++i) {
      if (dice.one_in(4)) c.batch.topk_ids[i] = c.batch.topk_ids[i - 1];
    }
  }
  return c;
}

LayerSetup random_setup(Dice& dice) {
  LayerSetup setup;
  setup.tuning.minibatch_rows = dice.any<std::int64_t>({0, 1, 1, 200, 600});
  setup.tuning.ring_tokens = dice.any<std::int64_t>({0, 1, 1, 70, 150});
  setup.tuning.ring_rows = dice.any<std::int64_t>({0, 1, 300, 900});
  setup.tuning.sms = static_cast<int>(dice.between(2, 4));
  setup.tuning.comm_sms = static_cast<int>(dice.between(1, setup.tuning.sms - 1));
  setup.options.saved_rows = dice.any<std::int64_t>({-1, -1, 0, 64, 200});
  setup.options.jitter_us = dice.one_in(4) ? 300 : 0;
  return setup;
}

std::string describe(const LayerCase& c, const LayerSetup& setup) {
  std::ostringstream text;
  const LayerShape& s = c.shape;
  text << "H " << s.hidden << " I " << s.intermediate << " E " << s.experts << " k " << s.topk << " S "
       << s.shared_intermediate << " clamp " << s.clamp.value_or(0) << " " << s.shared_clamp.value_or(0) << " tokens";
  for (const std::int64_t tokens : c.batch.tokens_per_rank) text << " " << tokens;
  text << " minibatch " << setup.tuning.minibatch_rows << " ring " << setup.tuning.ring_tokens << " "
       << setup.tuning.ring_rows << " sms " << setup.tuning.sms << " " << setup.tuning.comm_sms << " saved "
       << setup.options.saved_rows << " jitter " << setup.options.jitter_us;
  return text.str();
}

class EmulatorRandom : public testing::TestWithParam<int> {};

TEST_P(EmulatorRandom, ConfigurationsMatchTheReference) {
  for (int i = 0; i < 40; ++i) {
    const std::uint32_t seed = static_cast<std::uint32_t>(GetParam() * 1000 + i);
    Dice dice(seed);
    const LayerCase c = random_layer(dice, seed);
    const LayerSetup setup = random_setup(dice);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << describe(c, setup));
    expect_two_steps_match(c, setup);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, EmulatorRandom, testing::Range(1, 5));

}  // namespace
}  // namespace moewave::test
