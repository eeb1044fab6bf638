// Promises of the figures of bench: operations and bytes by GPU, the floor, medians.
#include "bench_numbers.h"

#include <gtest/gtest.h>

#include "support/layer_case.h"

namespace moewave::cli {
namespace {

// Two experts a rank, of which rank 1 uses one.
CallReport report_of_two_ranks() {
  CallReport report;
  report.ranks.resize(2);
  report.ranks[0].tokens = 10, report.ranks[0].routes = 20, report.ranks[0].rows = 30,
  report.ranks[0].pulled_tokens = 4;
  report.ranks[1].tokens = 5, report.ranks[1].routes = 10, report.ranks[1].rows = 0;
  report.pulled_bytes = {0, 400, 0, 0};
  report.pushed_bytes = {0, 900, 0, 0};
  report.expert_rows = {10, 20, 0, 0};
  return report;
}

TEST(BenchNumbers, WorkIsThatOfEachGpu) {
  const LayerShape shape = test::make_shape(64, 32, 4, 2, 16);
  const auto work = work_of_gpus(shape, report_of_two_ranks(), {0, 1});
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0].flops, 6.0 * 64 * (30 * 32 + 10 * 16));
  EXPECT_EQ(work[1].flops, 6.0 * 64 * (5 * 16));
  EXPECT_EQ(work[0].link_in, 400);
  EXPECT_EQ(work[0].link_out, 900);
  EXPECT_EQ(work[1].link_in, 900);
  EXPECT_EQ(work[1].link_out, 400);
  EXPECT_GT(work[0].hbm, 2.0 * 2 * 3 * 64 * 32);  // the weights of two experts
  EXPECT_LT(work[1].hbm, 2.0 * 3 * 64 * 32 + 2.0 * 3 * 64 * 16);
}

TEST(BenchNumbers, RanksOfOneGpuHaveNoLinkBetweenThem) {
  const auto work = work_of_gpus(test::make_shape(64, 32, 4, 2), report_of_two_ranks(), {3, 3});
  ASSERT_EQ(work.size(), 1u);
  EXPECT_EQ(work[0].flops, 6.0 * 64 * 30 * 32);
  EXPECT_EQ(work[0].link_in, 0);
  EXPECT_EQ(work[0].link_out, 0);
}

TEST(BenchNumbers, TheFloorIsTheLargestOfAllLimitsOfAllGpus) {
  EXPECT_STREQ(floor_of({{kPeakFlops, 1, 1, 1}, {1, 1, 1, 1}}).limit, "compute");
  EXPECT_DOUBLE_EQ(floor_of({{kPeakFlops, 1, 1, 1}, {1, 1, 2 * kPeakLink, 1}}).seconds, 2);
  EXPECT_STREQ(floor_of({{kPeakFlops, 1, 1, 1}, {1, 2 * kPeakLink, 1, 1}}).limit, "link");
  EXPECT_STREQ(floor_of({{1, 1, 1, kPeakHbm}}).limit, "memory");
  EXPECT_EQ(floor_of({{0, 0, 0, 0}}).seconds, 0);
}

TEST(BenchNumbers, MediansOfOddAndEvenCounts) {
  EXPECT_EQ(summary_of({3, 1, 2}).median, 2);
  EXPECT_EQ(summary_of({4, 1, 2, 3}).median, 2.5);
  EXPECT_EQ(summary_of({4, 1, 2, 3}).min, 1);
  EXPECT_EQ(summary_of({4, 1, 2, 3}).max, 4);
}

}  // namespace
}  // namespace moewave::cli
