// Promises about memory that one call uses several times, and about tokens that several minibatches use: a slow SM is
// always waited for. Delays are long and SMs many, so that what is not waited for is overtaken.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

LayerSetup many_sms() {
  LayerSetup setup = tiny_ring();
  setup.tuning.sms = 8;
  setup.tuning.comm_sms = 1;
  setup.options.jitter_us = 6000;
  return setup;
}

void expect_same_bits_under_delays(const LayerCase& c, LayerSetup setup) {
  const std::int64_t jitter_us = setup.options.jitter_us;
  setup.options.jitter_us = 0;
  const LayerSetup quiet = setup;
  const Results wanted = expect_two_steps_match(c, quiet);
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    setup.options.jitter_us = jitter_us;
    setup.options.jitter_seed = seed;
    expect_same_results(run_case(c, setup), wanted);
    if (testing::Test::HasFailure()) return;
  }
}

// Every token goes to all eight experts of rank 0 and is pulled for the first: the other minibatches pull nothing.
TEST(EmulatorRing, RowsWaitForTokensThatAnEarlierMinibatchPulls) {
  LayerCase c = random_case(make_shape(16, 8, 16, 8), {0, 20}, 150);
  route(c, [](std::int64_t, std::int64_t slot) { return slot; });
  LayerSetup setup = many_sms();
  setup.tuning.ring_tokens = setup.tuning.ring_rows = 0;
  expect_same_bits_under_delays(c, setup);
}

// One expert a macrobatch, so that no sum carried over macrobatches holds anybody back, and own tokens only, so that no
// pull does. Five column blocks of dx read what the macrobatch after the next overwrites.
TEST(EmulatorRing, GradientRowsWaitForTheirReaders) {
  LayerCase c = random_case(make_shape(1032, 8, 10, 1), {1280}, 151);
  route(c, [](std::int64_t token, std::int64_t) { return token / 128; });
  expect_same_bits_under_delays(c, many_sms());
}

// The same for dh, which reads recomputed rows. More SMs than the dx and wgrad tasks that wait for a delayed dh.
TEST(EmulatorRing, RecomputedRowsWaitForTheirReaders) {
  LayerCase c = random_case(make_shape(8, 264, 10, 1), {1280}, 152);
  route(c, [](std::int64_t token, std::int64_t) { return token / 128; });
  LayerSetup setup = many_sms();
  setup.tuning.sms = 20;
  setup.options.saved_rows = 0;
  expect_same_bits_under_delays(c, setup);
}

// Ten macrobatches of 32 pulled tokens each go through two segments.
TEST(EmulatorRing, TokenCopiesWaitForTheirReaders) {
  LayerCase c = random_case(make_shape(16, 520, 20, 1), {0, 320}, 153);
  route(c, [](std::int64_t token, std::int64_t) { return token / 32; });
  for (const std::int64_t saved_rows : {-1, 0}) {
    LayerSetup setup = many_sms();
    setup.options.saved_rows = saved_rows;
    expect_same_bits_under_delays(c, setup);
  }
}

// A minibatch as large as a macrobatch leaves every other minibatch empty: an empty one is no sign that those before it
// are done.
TEST(EmulatorRing, SlotsOfHWaitForTheirReadersAcrossEmptyMinibatches) {
  LayerCase c = random_case(make_shape(1032, 8, 10, 1), {1280}, 154);
  route(c, [](std::int64_t token, std::int64_t) { return token / 128; });
  for (const std::int64_t minibatch : {1, 1000}) {
    LayerSetup setup = many_sms();
    setup.tuning.minibatch_rows = minibatch;
    expect_same_bits_under_delays(c, setup);
  }
}

}  // namespace
}  // namespace moewave::test
