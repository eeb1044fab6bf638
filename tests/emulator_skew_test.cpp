// Promises under skewed routing and unequal numbers of tokens: the same results, only later.
#include <gtest/gtest.h>

#include <random>

#include "support/emulated.h"

namespace moewave::test {
namespace {

// B16: nothing is dropped when every token goes to one rank.
TEST(EmulatorSkew, EverythingToOneRankLosesNothing) {
  LayerCase c = marked_case(make_shape(128, 64, 8, 2), {200, 200}, 20);
  for (const std::int64_t begin : {0, 4}) {
    route_within(c, begin, begin + 4);
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
      const Results results = expect_two_steps_match(c, setup);
      EXPECT_EQ(results.forward_report.ranks[begin == 0 ? 0 : 1].rows, 800);
    }
  }
}

TEST(EmulatorSkew, EverythingToOneExpertIsRight) {
  for (const std::int32_t expert : {0, 3, 6}) {
    LayerCase c = marked_case(make_shape(64, 40, 7, 1), {150, 0, 90}, 21);
    route(c, [=](std::int64_t, std::int64_t) { return expert; });
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) expect_two_steps_match(c, setup);
  }
}

// B18: all of the load on the first experts, then on the last, for every way to cut the work.
TEST(EmulatorSkew, AnyCutHoldsLoadOnTheFirstOrTheLastExperts) {
  LayerCase c = marked_case(make_shape(64, 32, 8, 2), {130, 70}, 22);
  for (const std::int64_t begin : {0, 2, 4, 6}) {
    route_within(c, begin, begin + 2);
    const ReferenceResult reference = run_reference(c.shape, c.weights, c.batch, true);
    for (const std::int64_t minibatch : {1, 200, 1000}) {
      for (const std::int64_t ring : {1, 100, 0}) {
        for (const std::int64_t rows : {1, 300, 0}) {
          LayerSetup setup;
          setup.tuning.minibatch_rows = minibatch;
          setup.tuning.ring_tokens = ring;
          setup.tuning.ring_rows = rows;
          expect_matches(c, run_case(c, setup), reference);
        }
      }
    }
  }
}

TEST(EmulatorSkew, RealisticSkewIsRight) {
  for (const char* routing : {"zipf:1", "zipf:2", "single:5"}) {
    const LayerCase c = marked_case(make_shape(128, 64, 16, 4), {100, 90, 80, 110}, 23, routing);
    expect_two_steps_match(c);
    expect_two_steps_match(c, tiny_ring());
  }
}

// B46: with the smallest minibatch and ring, ranks differ widely in how many of them they go through.
TEST(EmulatorUnequalTokens, AThousandTokensBesideTenOrNoneFinishAndMatch) {
  for (const Tokens& tokens : {Tokens{1000, 10}, Tokens{1000, 0}, Tokens{0, 1000}}) {
    const LayerCase c = marked_case(make_shape(32, 16, 6, 2), tokens, 24);
    const Results results = expect_two_steps_match(c, tiny_ring());
    EXPECT_GT(results.forward_report.ranks[tokens[0] == 0 ? 0 : 1].macrobatches, 2);
  }
}

// B44: no multiple of anything.
TEST(EmulatorUnequalTokens, FiveSixSevenEightTokensAreRight) {
  const LayerCase c = marked_case(make_shape(64, 32, 8, 3), {5, 6, 7, 8}, 25);
  expect_two_steps_match(c);
  expect_two_steps_match(c, tiny_ring());
}

// B42: within max_tokens; each step exceeds all earlier ones on one rank only, now and then.
TEST(EmulatorUnequalTokens, FiftyStepsOfIndependentTokenCountsMatchOnOneWorkspace) {
  const LayerShape shape = make_shape(32, 16, 6, 2);
  std::mt19937 random(26);
  for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
    setup.max_tokens = 300;
    EmulatedLayer layer(shape, 4, setup.max_tokens, setup.tuning, setup.options);
    for (std::uint64_t step = 0; step < 25; ++step) {
      Tokens tokens(4);
      for (std::int64_t& count : tokens) count = static_cast<std::int64_t>(random() % (12 * (step + 1) + 1));
      if (step % 7 == 6) tokens[random() % 4] = 300;
      const LayerCase c = marked_case(shape, tokens, 1000 + step);
      expect_matches(c, run_step(layer, c));
    }
  }
}

}  // namespace
}  // namespace moewave::test
