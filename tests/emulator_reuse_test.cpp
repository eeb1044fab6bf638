// Promises about calls that follow one another without a barrier: buffers, contexts, counters and epochs in reuse.
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "support/emulated.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

// A step's results beside those of the same step on a layer of its own.
struct Step {
  LayerCase c;
  Results results;

  explicit Step(LayerCase step_case) : c(std::move(step_case)), results(c) {}
};

std::deque<Step> different_steps(const LayerShape& shape, int ranks, std::int64_t max_tokens, int count) {
  std::mt19937 random(60);
  std::deque<Step> steps;
  for (int i = 0; i < count; ++i) {
    Tokens tokens(static_cast<std::size_t>(ranks));
    for (std::int64_t& tokens_of_rank : tokens) tokens_of_rank = static_cast<std::int64_t>(random() % (max_tokens + 1));
    steps.emplace_back(random_case(shape, tokens, 6000 + static_cast<std::uint64_t>(i)));
  }
  return steps;
}

void expect_each_as_if_alone(const std::deque<Step>& steps, LayerSetup setup) {
  setup.options.jitter_us = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    expect_matches(steps[i].c, steps[i].results);
    expect_same_results(steps[i].results, run_case(steps[i].c, setup));
    if (testing::Test::HasFailure()) return;
  }
}

// B68: a rank may be a call ahead of another. Backward of a step follows the forward of the next one.
TEST(EmulatorReuse, FiveHundredCallsWithoutABarrierEachActAsIfAlone) {
  std::deque<Step> steps = different_steps(make_shape(16, 8, 5, 2), 3, 45, 250);
  std::vector<EmulatedCall> calls;
  for (std::size_t i = 0; i <= steps.size(); ++i) {
    if (i < steps.size()) calls.push_back(forward_call(steps[i].c, steps[i].results));
    if (i > 0) calls.push_back(backward_call(steps[i - 1].c, steps[i - 1].results));
  }
  ASSERT_EQ(calls.size(), 500u);
  LayerSetup setup = tiny_ring();
  setup.max_tokens = 45;
  setup.options.jitter_us = 1500;
  setup.options.jitter_seed = 68;
  EmulatedLayer layer(steps[0].c.shape, 3, setup.max_tokens, setup.tuning, setup.options);
  layer.run(calls);
  expect_each_as_if_alone(steps, setup);
}

// Delays as long as many calls: forward only, so that nothing but entry and exit flags keeps ranks together.
TEST(EmulatorReuse, RanksThatAreDelayedForLongNeverMixTwoCalls) {
  std::deque<Step> steps = different_steps(make_shape(8, 8, 4, 2), 4, 6, 60);
  std::vector<EmulatedCall> calls;
  for (Step& step : steps) calls.push_back(forward_call(step.c, step.results));
  LayerSetup setup;
  setup.tuning = {.sms = 2, .comm_sms = 1};
  setup.max_tokens = 6;
  setup.options.jitter_us = 5000;
  EmulatedLayer layer(steps[0].c.shape, 4, 6, setup.tuning, setup.options);
  layer.run(calls);
  for (Step& step : steps) {
    expect_close("output", widen(step.results.output),
                 run_reference(step.c.shape, step.c.weights, step.c.batch, false).output, 8, 5e-3);
  }
}

// Epochs pass from 2^32 - 1 to 0 in the middle of a run, at every parity and distance.
TEST(EmulatorReuse, EpochsWrapUnnoticed) {
  std::deque<Step> steps = different_steps(make_shape(16, 8, 5, 2), 3, 40, 4);
  for (std::uint32_t before_wrap = 0; before_wrap < 9; ++before_wrap) {
    std::vector<EmulatedCall> calls;
    for (Step& step : steps) {
      step.results = Results(step.c);
      calls.push_back(forward_call(step.c, step.results));
      calls.push_back(backward_call(step.c, step.results));
    }
    LayerSetup setup = tiny_ring();
    setup.options.first_epoch = 0u - before_wrap;
    setup.options.jitter_us = 200;
    EmulatedLayer layer(steps[0].c.shape, 3, 40, setup.tuning, setup.options);
    layer.run(calls);
    setup.max_tokens = 40;
    setup.options.first_epoch = 0;
    expect_each_as_if_alone(steps, setup);
  }
}

// B70.
TEST(EmulatorReuse, TwoContextsInFlightMayBeUsedInEitherOrderAndAgain) {
  const LayerShape shape = make_shape(32, 16, 5, 2, 24);
  for (const std::int64_t saved_rows : {-1, 0}) {
    LayerSetup setup = tiny_ring();
    setup.max_tokens = 70;
    setup.options.saved_rows = saved_rows;
    const LayerCase a = marked_case(shape, {70, 20}, 61);
    const LayerCase b = marked_case(shape, {3, 66}, 62);
    const Results a_alone = run_case(a, setup);
    const Results b_alone = run_case(b, setup);
    EmulatedLayer layer = make_layer(a, setup);
    for (const bool a_first : {true, false}) {
      Results of_a(a);
      Results of_b(b);
      const std::vector<EmulatedCall> calls = {forward_call(a, of_a), forward_call(b, of_b),
                                               a_first ? backward_call(a, of_a) : backward_call(b, of_b),
                                               a_first ? backward_call(b, of_b) : backward_call(a, of_a)};
      layer.run(calls);
      expect_same_results(of_a, a_alone);
      expect_same_results(of_b, b_alone);
      layer.backward(a.weights, a.batch, of_a.context, of_a.gradients);
      expect_same_results(of_a, a_alone);
    }
  }
}

// B70: what cannot be right is refused.
TEST(EmulatorReuse, ContextsThatDoNotBelongToTheCallAreRefused) {
  const LayerShape shape = make_shape(32, 16, 5, 2);
  const LayerCase a = marked_case(shape, {7, 20}, 63);
  const LayerCase other_ids = marked_case(shape, {7, 20}, 64);
  LayerCase other_split = a;
  other_split.batch.tokens_per_rank = {8, 19};
  LayerSetup setup;
  setup.max_tokens = 20;
  EmulatedLayer layer = make_layer(a, setup);
  EmulatedLayer other_layer = make_layer(a, setup);
  Results results = run_step(layer, a);
  const auto backward_refused = [&](EmulatedLayer& on, const LayerCase& c, SavedContext& context, const char* part) {
    HostGradients gradients;
    const std::string message = refusal([&] { on.backward(c.weights, c.batch, context, gradients); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  SavedContext empty;
  backward_refused(layer, a, empty, "not filled");
  backward_refused(other_layer, a, results.context, "another layer");
  backward_refused(layer, other_ids, results.context, "another batch");
  backward_refused(layer, other_split, results.context, "another batch");

  EmulatedCall call = backward_call(a, results);
  call.context = nullptr;
  EXPECT_NE(refusal([&] { layer.run({&call, 1}); }).find("context"), std::string::npos);
  call = backward_call(a, results);
  call.gradients = nullptr;
  EXPECT_NE(refusal([&] { layer.run({&call, 1}); }).find("gradients"), std::string::npos);
  call = forward_call(a, results);
  call.output = nullptr;
  EXPECT_NE(refusal([&] { layer.run({&call, 1}); }).find("output"), std::string::npos);
  call = EmulatedCall{};
  EXPECT_NE(refusal([&] { layer.run({&call, 1}); }).find("weights"), std::string::npos);

  expect_matches(a, run_step(layer, a));
}

TEST(EmulatorReuse, AContextMovesAndWhatItWasMovedFromCanBeFilledAgain) {
  const LayerCase a = marked_case(make_shape(32, 16, 5, 2), {7, 20}, 65);
  EmulatedLayer layer = make_layer(a);
  const Results wanted = run_step(layer, a);
  Results results(a);
  layer.forward(a.weights, a.batch, results.output, &results.context);
  EXPECT_GT(results.context.bytes(), 0);
  SavedContext moved = std::move(results.context);
  layer.backward(a.weights, a.batch, moved, results.gradients);
  expect_same_results(results, wanted);
  EXPECT_EQ(results.context.bytes(), 0);
  EXPECT_NE(refusal([&] { layer.backward(a.weights, a.batch, results.context, results.gradients); }).find("not filled"),
            std::string::npos);
  run_step(layer, a, results);
  expect_same_results(results, wanted);
}

TEST(EmulatorReuse, ForwardWithoutAContextHasTheSameBits) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2, 8), {90, 20}, 66);
  EmulatedLayer layer = make_layer(c, tiny_ring());
  const Results wanted = run_step(layer, c);
  std::vector<Bf16> output;
  layer.forward(c.weights, c.batch, output);
  expect_same_bits("output", output, wanted.output);
}

TEST(EmulatorReuse, NewWeightsCountFromTheNextCall) {
  const LayerShape shape = make_shape(32, 16, 5, 2);
  LayerCase c = marked_case(shape, {30, 20}, 67);
  EmulatedLayer layer = make_layer(c);
  run_step(layer, c);
  c.weights = random_weights(shape, 68);
  expect_matches(c, run_step(layer, c));
  for (Bf16& value : c.weights.down) value = to_bf16(to_float(value) + 0.5f);  // in place
  expect_matches(c, run_step(layer, c));
}

}  // namespace
}  // namespace moewave::test
