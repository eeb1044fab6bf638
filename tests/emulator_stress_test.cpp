// Back-to-back calls with tiny rings and delays, for ThreadSanitizer: whatever one role hands to another without an
// edge in between is a data race here.
#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "support/emulated.h"

namespace moewave::test {
namespace {

struct Step {
  LayerCase c;
  Results results;

  explicit Step(LayerCase step_case) : c(std::move(step_case)), results(c) {}
};

// Runs forward and backward of every step, the backward of one after the forward of the next, and checks all.
void run_back_to_back(const LayerShape& shape, const std::vector<Tokens>& tokens_of_steps, LayerSetup setup) {
  std::deque<Step> steps;
  for (const Tokens& tokens : tokens_of_steps) {
    steps.emplace_back(random_case(shape, tokens, 130 + steps.size(), steps.size() % 3 == 0 ? "zipf:2" : "uniform"));
    mask_routes(steps.back().c, 10, static_cast<std::uint32_t>(steps.size()));
  }
  std::vector<EmulatedCall> calls;
  for (std::size_t i = 0; i <= steps.size(); ++i) {
    if (i < steps.size()) calls.push_back(forward_call(steps[i].c, steps[i].results));
    if (i > 0) calls.push_back(backward_call(steps[i - 1].c, steps[i - 1].results));
  }
  EmulatedLayer layer(shape, static_cast<int>(tokens_of_steps[0].size()), 110, setup.tuning, setup.options);
  layer.run(calls);
  for (const Step& step : steps) expect_matches(step.c, step.results);
}

const std::vector<Tokens> kSteps = {{100, 0, 70}, {3, 110, 40}, {90, 90, 90}, {0, 0, 0},   {1, 2, 3},
                                    {0, 110, 0},  {70, 33, 64}, {32, 31, 33}, {110, 5, 0}, {64, 96, 1}};

TEST(EmulatorStress, SmallestRingWithDelays) {
  LayerSetup setup = tiny_ring();
  setup.tuning.sms = 4;
  setup.tuning.comm_sms = 2;
  setup.options.jitter_us = 300;
  run_back_to_back(make_shape(16, 8, 5, 3), kSteps, setup);
}

TEST(EmulatorStress, RecomputationAndSharedExpertWithDelays) {
  LayerSetup setup = tiny_ring();
  setup.options.saved_rows = 64;
  setup.options.jitter_us = 300;
  run_back_to_back(make_shape(16, 8, 4, 2, 8), kSteps, setup);
  setup.options.saved_rows = 0;
  run_back_to_back(make_shape(16, 8, 4, 2, 8), kSteps, setup);
}

TEST(EmulatorStress, WholeRingWithoutDelays) {
  LayerSetup setup;
  setup.tuning.minibatch_rows = 1;
  setup.options.poison = false;
  setup.options.timeline = true;
  run_back_to_back(make_shape(16, 8, 7, 4), kSteps, setup);
}

TEST(EmulatorStress, SeveralColumnBlocks) {
  LayerSetup setup = tiny_ring();
  setup.options.jitter_us = 100;
  run_back_to_back(make_shape(264, 136, 3, 2), {{40, 0, 50}, {20, 90, 3}}, setup);
}

// A rank alone recomputes without any pull that would hold it back, on more SMs than tasks that wait for a delayed one.
TEST(EmulatorStress, RecomputationOfOwnTokens) {
  LayerCase c = random_case(make_shape(8, 264, 8, 1), {1024}, 139);
  route(c, [](std::int64_t token, std::int64_t) { return token / 128; });
  LayerSetup setup = tiny_ring();
  setup.tuning.sms = 20;
  setup.options.saved_rows = 0;
  setup.options.jitter_us = 2000;
  EmulatedLayer layer = make_layer(c, setup);
  for (int step = 0; step < 3; ++step) expect_matches(c, run_step(layer, c));
}

TEST(EmulatorStress, TwoLayersAtOnce) {
  const auto run = [] {
    LayerSetup setup = tiny_ring();
    setup.options.jitter_us = 200;
    run_back_to_back(make_shape(16, 8, 5, 2), {kSteps.begin(), kSteps.begin() + 5}, setup);
  };
  std::thread other(run);
  run();
  other.join();
}

TEST(EmulatorStress, TimeOutAndRecovery) {
  const LayerCase c = random_case(make_shape(16, 8, 5, 2), {100, 40, 60}, 140);
  LayerSetup setup = tiny_ring();
  setup.options.jitter_us = 3000;
  setup.options.pipeline_timeout_ms = 1;
  EmulatedLayer layer = make_layer(c, setup);
  int timeouts = 0;
  // On a busy machine a wait may look at the clock too seldom to notice, so that a run needs luck to break.
  for (int repeat = 0; timeouts < 5 && repeat < 300; ++repeat) {
    Results results(c);
    try {
      run_step(layer, c, results);
      expect_matches(c, results);
    } catch (const TimeoutError&) {
      ++timeouts;
      layer.recover();
    }
  }
  EXPECT_GT(timeouts, 0);
}

}  // namespace
}  // namespace moewave::test
