// Promises about the sizes a layer takes: widths, numbers of experts, routes and ranks, and what it refuses.
#include <gtest/gtest.h>

#include "support/emulated.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

// B53: hidden and intermediate sizes of real models, an eighth of each.
TEST(EmulatorShapes, WidthsInTheProportionsOfRealModelsAreRight) {
  for (const auto& [hidden, intermediate] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {256, 96}, {512, 192}, {360, 360}, {384, 192}, {896, 256}, {640, 192}}) {
    SCOPED_TRACE(testing::Message() << "H " << hidden << " I " << intermediate);
    const LayerCase c = marked_case(make_shape(hidden, intermediate, 4, 2), {13, 20}, 50);
    expect_matches(c, run_case(c));
  }
}

// Tails of every kind of column block: 128 of h, 256 of y, dh and dx, 128 by 256 of the weight gradients.
TEST(EmulatorShapes, EveryMultipleOfEightAroundABlockIsRight) {
  for (const std::int64_t hidden : {8, 120, 128, 136, 256, 264}) {
    for (const std::int64_t intermediate : {8, 120, 136, 256, 264}) {
      SCOPED_TRACE(testing::Message() << "H " << hidden << " I " << intermediate);
      const LayerCase c = marked_case(make_shape(hidden, intermediate, 3, 2), {5, 4}, 51);
      expect_matches(c, run_case(c));
    }
  }
}

// B55, B57.
TEST(EmulatorShapes, AnyNumberOfExpertsAndRoutesIsRight) {
  for (const std::int64_t experts : {1, 2, 3, 64, 255, 256, 257, 384, 512}) {
    for (const std::int64_t topk : {1, 2, 6, 8, 16}) {
      if (topk > experts) continue;
      SCOPED_TRACE(testing::Message() << "E " << experts << " k " << topk);
      const LayerCase c = random_case(make_shape(16, 8, experts, topk), {21, 0, 34}, 52);
      expect_matches(c, run_case(c));
    }
  }
}

TEST(EmulatorShapes, EveryTopkUpToItsLimitIsRight) {
  for (const std::int64_t topk : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 32, 64}) {
    SCOPED_TRACE(testing::Message() << "k " << topk);
    const LayerCase c = random_case(make_shape(32, 16, 64, topk), {9, 6}, 53);
    expect_matches(c, run_case(c, tiny_ring()));
  }
}

// B30, second half.
TEST(EmulatorShapes, ExpertsNeedNotDivideOverRanksAndRanksMayOutnumberThem) {
  for (const int ranks : {1, 2, 3, 4, 5, 8, 11}) {
    SCOPED_TRACE(testing::Message() << "R " << ranks);
    const LayerCase c = marked_case(make_shape(64, 32, 7, 3), even_split(90, ranks), 54);
    expect_matches(c, run_case(c));
    expect_matches(c, run_case(c, tiny_ring()));
  }
}

// B30, first half; B59.
TEST(EmulatorShapes, IllegalLayersAreRefusedAtConstruction) {
  const auto construct = [](const LayerShape& shape, int ranks, std::int64_t tokens, const Tuning& tuning) {
    return refusal([&] { EmulatedLayer(shape, ranks, tokens, tuning); });
  };
  const LayerShape good = make_shape(16, 8, 4, 2);
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(construct(make_shape(16, 8, 0, 2), 2, 8, {}), "experts is 0");
  contains(construct(make_shape(12, 8, 4, 2), 2, 8, {}), "hidden is 12");
  contains(construct(make_shape(16, 9, 4, 2), 2, 8, {}), "intermediate is 9");
  contains(construct(make_shape(16, 8, 4, 2, 4), 2, 8, {}), "shared_intermediate is 4");
  contains(construct(good, 0, 8, {}), "ranks is 0");
  contains(construct(good, 2, -1, {}), "max_tokens is -1");
  contains(construct(good, 2, 8, {.sms = 4, .comm_sms = 4}), "comm_sms is 4");
  contains(construct(good, 2, 8, {.ring_tokens = -1}), "ring_tokens is -1");
  contains(construct(good, 1024, 8, {}), "1024 ranks");
  contains(construct(good, 2, std::int64_t{1} << 30, {}), "max_tokens is 1073741824");
}

// B30: weights of another number of experts; any tensor of another size.
TEST(EmulatorShapes, CallsWhoseTensorsDoNotFitAreRefusedBeforeAnyWork) {
  const LayerCase good = random_case(make_shape(16, 8, 4, 2, 24), {5, 6}, 55);
  EmulatedLayer layer = make_layer(good);
  Results results = run_step(layer, good);
  const auto refused = [&](const char* name, const std::function<void(LayerCase&)>& bend) {
    LayerCase bad = good;
    bend(bad);
    const std::string message = refusal([&] { run_step(layer, bad, results); });
    EXPECT_NE(message.find(name), std::string::npos) << message;
  };
  refused("gate_up has 768", [](LayerCase& c) { c.weights.gate_up.resize(768); });
  refused("down", [](LayerCase& c) { c.weights.down.resize(128); });
  refused("shared_gate", [](LayerCase& c) { c.weights.shared_gate.clear(); });
  refused("shared_up", [](LayerCase& c) { c.weights.shared_up.push_back({}); });
  refused("shared_down", [](LayerCase& c) { c.weights.shared_down.clear(); });
  refused("tokens_per_rank has 3", [](LayerCase& c) { c.batch.tokens_per_rank.push_back(0); });
  refused("-1", [](LayerCase& c) { c.batch.tokens_per_rank = {-1, 12}; });
  refused("hidden_states", [](LayerCase& c) { c.batch.hidden_states.pop_back(); });
  refused("topk_ids", [](LayerCase& c) { c.batch.topk_ids.push_back(0); });
  refused("topk_weights", [](LayerCase& c) { c.batch.topk_weights.clear(); });
  refused("grad_output", [](LayerCase& c) { c.batch.grad_output.clear(); });

  Results partial(good);
  partial.gradients.accumulate = true;
  partial.gradients.down.f32.pop_back();
  run_step(layer, good, results);
  const std::string message = refusal([&] { run_step(layer, good, partial); });
  EXPECT_NE(message.find("down"), std::string::npos) << message;
  expect_matches(good, run_step(layer, good));
}

// What runs is what tuning() says: rounded up, never below what was asked, never more than could be used.
TEST(EmulatorShapes, TuningInUseIsRoundedUpAndAnyPositiveValueRuns) {
  const LayerCase c = random_case(make_shape(32, 16, 6, 2), {100, 80}, 56);
  for (const std::int64_t value : {1, 31, 127, 129, 1'000'000'000}) {
    LayerSetup setup;
    setup.tuning.minibatch_rows = setup.tuning.ring_tokens = setup.tuning.ring_rows = value;
    EmulatedLayer layer = make_layer(c, setup);
    EXPECT_EQ(layer.tuning().minibatch_rows % 128, 0);
    EXPECT_GE(layer.tuning().minibatch_rows, std::min<std::int64_t>(value, 512));
    EXPECT_GE(layer.tuning().ring_tokens, std::min<std::int64_t>(value, 100));
    EXPECT_GE(layer.tuning().ring_rows, std::min<std::int64_t>(value, 400));
    expect_matches(c, run_step(layer, c));
  }
}

}  // namespace
}  // namespace moewave::test
