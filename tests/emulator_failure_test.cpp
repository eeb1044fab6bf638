// Promises about what goes wrong: bounded waits with a record, refusals that all ranks share, and that the layer works
// afterwards.
#include <gtest/gtest.h>

#include "support/emulated.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

LayerSetup impatient_entry() {
  LayerSetup setup = tiny_ring();
  setup.options.entry_timeout_ms = 500;
  return setup;
}

TimeoutError expect_timeout(EmulatedLayer& layer, std::span<const EmulatedCall> calls) {
  try {
    layer.run(calls);
  } catch (const TimeoutError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error;
  }
  ADD_FAILURE() << "the run came to an end although a rank was absent";
  return TimeoutError("", {});
}

// The record names who waited, in which role and phase, and for whom.
TEST(EmulatorTimeout, AnAbsentRankIsNamedByTheOthersAndTheNextRunWorksAfterRecovery) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2), {30, 50, 7}, 100);
  const Results wanted = run_case(c, tiny_ring());
  EmulatedLayer layer = make_layer(c, impatient_entry());
  for (const bool backward : {false, true}) {
    for (int absent = 0; absent < 3; ++absent) {
      SCOPED_TRACE(testing::Message() << "rank " << absent << (backward ? ", backward" : ", forward"));
      Results results(c);
      std::vector<EmulatedCall> calls = {forward_call(c, results), backward_call(c, results)};
      calls[backward ? 1 : 0].absent_rank = absent;
      const TimeoutError error = expect_timeout(layer, calls);
      EXPECT_NE(error.record().rank, absent);
      EXPECT_EQ(error.record().role, "entry");
      EXPECT_EQ(error.record().phase, "entry");
      EXPECT_EQ(error.record().waiting_for, "ids of rank[" + std::to_string(absent) + "]");
      EXPECT_EQ(error.record().wanted, error.record().seen + 1);
      EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(error.record().rank)), std::string::npos);

      // Until recovery every run is refused, as a failure and not as bad input.
      Results next(c);
      const std::vector<EmulatedCall> next_calls = {forward_call(c, next), backward_call(c, next)};
      try {
        layer.run(next_calls);
        ADD_FAILURE() << "ran without recovery";
      } catch (const InputError&) {
        ADD_FAILURE() << "bad input";
      } catch (const Error& refused) {
        EXPECT_NE(std::string(refused.what()).find("recover"), std::string::npos);
      }
      layer.recover();
      HostGradients gradients;
      EXPECT_NE(refusal([&] { layer.backward(c.weights, c.batch, results.context, gradients); }).find("not filled"),
                std::string::npos);
      layer.run(next_calls);
      expect_same_results(next, wanted);
    }
  }
}

TEST(EmulatorTimeout, ARankMissingInTheMiddleOfManyCallsStopsAll) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2), {30, 50}, 101);
  LayerSetup setup = impatient_entry();
  setup.options.first_epoch = 0xfffffffbu;  // and the new generation lies behind the wrap of epochs
  EmulatedLayer layer = make_layer(c, setup);
  const Results wanted = run_case(c, tiny_ring());
  std::vector<Results> results;
  for (int i = 0; i < 10; ++i) results.emplace_back(c);
  std::vector<EmulatedCall> calls;
  for (Results& r : results) calls.push_back(forward_call(c, r));
  calls[4].absent_rank = 1;
  EXPECT_EQ(expect_timeout(layer, calls).record().rank, 0);
  layer.recover();
  expect_same_results(run_step(layer, c), wanted);
}

// Limits so short that ordinary delays break them anywhere in the pipeline: an error or the right result, never a hang,
// and recovery always works.
TEST(EmulatorTimeout, WaitsInEveryPhaseEndAndRecoveryAlwaysWorks) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2, 8), {60, 80, 7}, 102);
  const Results wanted = run_case(c, tiny_ring());
  LayerSetup setup = tiny_ring();
  setup.options.jitter_us = 4000;
  setup.options.pipeline_timeout_ms = 1;
  EmulatedLayer layer = make_layer(c, setup);
  int timeouts = 0;
  // On a busy machine a wait may look at the clock too seldom to notice, so that a run needs luck to break.
  for (int repeat = 0; timeouts < 15 && repeat < 400; ++repeat) {
    Results results(c);
    try {
      run_step(layer, c, results);
      expect_same_results(results, wanted);
    } catch (const TimeoutError& error) {
      ++timeouts;
      EXPECT_NE(error.record().phase, "entry");
      EXPECT_FALSE(error.record().role.empty());
      EXPECT_GE(error.record().rank, 0);
      EXPECT_GE(error.record().sm, 0);
      layer.recover();
    }
  }
  EXPECT_GT(timeouts, 0);
}

TEST(EmulatorDisagreement, ARankInAnotherDirectionMakesAllRefuseAndTheNextCallsWork) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2), {30, 50, 7}, 103);
  const Results wanted = run_case(c);
  EmulatedLayer layer = make_layer(c);
  for (int rank = 0; rank < 3; ++rank) {
    Results before(c);
    Results broken(c);
    Results after(c);
    std::vector<EmulatedCall> calls = {forward_call(c, before), backward_call(c, before), forward_call(c, broken),
                                       forward_call(c, after), backward_call(c, after)};
    calls[2].disagreeing_rank = rank;
    try {
      layer.run(calls);
      ADD_FAILURE() << "ran in two directions at once";
    } catch (const InputError&) {
      ADD_FAILURE() << "bad input";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("call 2"), std::string::npos) << message;
      EXPECT_NE(message.find("disagree"), std::string::npos) << message;
    }
    expect_same_results(before, wanted);
    expect_same_results(after, wanted);
    expect_same_results(run_step(layer, c), wanted);

    HostGradients gradients;
    EXPECT_NE(refusal([&] { layer.backward(c.weights, c.batch, broken.context, gradients); }).find("not filled"),
              std::string::npos);
  }
}

TEST(EmulatorDisagreement, BackwardOfACallThatAllRefusedIsRefusedToo) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2), {30, 50}, 104);
  EmulatedLayer layer = make_layer(c);
  Results results(c);
  std::vector<EmulatedCall> calls = {forward_call(c, results), backward_call(c, results)};
  calls[0].disagreeing_rank = 1;
  EXPECT_THROW(layer.run(calls), Error);
  expect_matches(c, run_step(layer, c));
}

// A backward call that was given up leaves buffers that are added to as they were.
TEST(EmulatorDisagreement, ARefusedBackwardAddsNothing) {
  const LayerCase c = marked_case(make_shape(32, 16, 5, 2, 8), {30, 50}, 105);
  EmulatedLayer layer = make_layer(c);
  Results results = run_step(layer, c);
  const Results wanted = run_step(layer, c);
  results.gradients.accumulate = true;
  EmulatedCall call = backward_call(c, results);
  call.disagreeing_rank = 0;
  EXPECT_THROW(layer.run({&call, 1}), Error);
  expect_same_weight_gradients(results, wanted);
}

// B20: 129 tokens on one rank of a layer made for 128.
TEST(EmulatorRefusal, MoreTokensThanTheLayerWasMadeForAreRefusedByAllAndTheNextCallsWork) {
  const LayerShape shape = make_shape(32, 16, 5, 2, 8);
  const LayerCase good = marked_case(shape, {128, 3, 100}, 106);
  LayerSetup setup = tiny_ring();
  setup.max_tokens = 128;
  EmulatedLayer layer = make_layer(good, setup);
  const Results wanted = run_step(layer, good);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    Tokens tokens = {5, 128, 0};
    tokens[rank] = 129;
    const LayerCase bad = marked_case(shape, tokens, 107);
    Results before(good);
    Results of_bad(bad);
    Results after(good);
    const std::vector<EmulatedCall> calls = {forward_call(good, before), backward_call(good, before),
                                             forward_call(bad, of_bad), forward_call(good, after),
                                             backward_call(good, after)};
    const std::string message = refusal([&] { layer.run(calls); });
    EXPECT_NE(message.find("rank " + std::to_string(rank) + " has 129 tokens"), std::string::npos) << message;
    EXPECT_NE(message.find("at most 128"), std::string::npos) << message;
    expect_same_results(before, wanted);
    expect_same_results(after, wanted);
    expect_same_results(run_step(layer, good), wanted);
  }
}

}  // namespace
}  // namespace moewave::test
