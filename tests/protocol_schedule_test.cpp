// Promises of the schedule: it is what a plain sort would give, whoever builds it, and everything that reads it can
// rely on its bounds.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "protocol/schedule.h"
#include "support/schedule_cases.h"
#include "support/schedule_model.h"

namespace moewave::test {
namespace {

using protocol::Geometry;
using protocol::kTileRows;
using protocol::Schedule;

void expect_model(const ScheduleCase& c) {
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  ModelSchedule model(c);
  const std::string difference = first_difference(built.view(), model.view());
  EXPECT_EQ(difference, "") << c;
}

ScheduleCase make_case(int rank, std::vector<std::int32_t> tokens, std::int64_t experts, std::int64_t topk,
                       const Tuning& tuning) {
  LayerShape shape;
  shape.hidden = shape.intermediate = 8;
  shape.experts = experts;
  shape.topk = topk;
  const int ranks = static_cast<int>(tokens.size());
  const std::int64_t most = *std::max_element(tokens.begin(), tokens.end());
  ScheduleCase c;
  c.geometry = plan::make_geometry(shape, ranks, most, plan::resolve_tuning(shape, ranks, most, tuning), 0);
  c.rank = rank;
  c.tokens_per_rank = std::move(tokens);
  return c;
}

RC_GTEST_PROP(Schedule, EqualsThePlainModel, ()) {
  const ScheduleCase c = draw_case(200);
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  ModelSchedule model(c);
  const std::string difference = first_difference(built.view(), model.view());
  if (!difference.empty()) RC_LOG() << c << '\n' << difference << '\n';
  RC_ASSERT(difference.empty());
  RC_TAG(c.geometry.segments == 1 ? "one segment" : model.totals.macrobatches > 2 ? "ring reused" : "two segments");
}

RC_GTEST_PROP(Schedule, DoesNotDependOnTheNumberOfWorkers, ()) {
  const ScheduleCase c = draw_case(120);
  BuiltSchedule one(c);
  one.build(c.ids, 1);
  for (const int workers : {3, 8}) {
    BuiltSchedule several(c);
    several.build(c.ids, workers);
    const std::string difference = first_difference(one.view(), several.view());
    if (!difference.empty()) RC_LOG() << workers << " workers, " << c << '\n' << difference << '\n';
    RC_ASSERT(difference.empty());
  }
}

RC_GTEST_PROP(Schedule, EveryRouteToALocalExpertHasOneRowAndNoOtherRouteHas, ()) {
  const ScheduleCase c = draw_case(150);
  const Geometry& g = c.geometry;
  std::set<std::pair<int, std::int32_t>> scheduled;
  for (int rank = 0; rank < g.ranks; ++rank) {
    ScheduleCase of_rank = c;
    of_rank.rank = rank;
    BuiltSchedule built(of_rank);
    built.build(c.ids, 1);
    const Schedule s = built.view();
    for (std::int32_t tile = 0; tile < s.totals->tiles; ++tile) {
      RC_ASSERT(s.tiles[tile].rows >= 1 && s.tiles[tile].rows <= kTileRows);
      for (std::int64_t row = std::int64_t{tile} * kTileRows; row < tile * kTileRows + s.tiles[tile].rows; ++row) {
        const protocol::RouteRef route = s.row_route[row];
        const std::int32_t id =
            c.ids.at(static_cast<std::size_t>(route.rank)).at(static_cast<std::size_t>(route.route));
        RC_ASSERT(id == protocol::first_expert(g.experts, g.ranks, rank) + s.tiles[tile].expert);
        RC_ASSERT(scheduled.emplace(route.rank, route.route).second);
      }
    }
  }
  std::size_t legal = 0;
  for (const auto& ids : c.ids) {
    for (const std::int32_t id : ids) legal += id >= 0 && id < g.experts ? 1 : 0;
  }
  RC_ASSERT(scheduled.size() == legal);
}

RC_GTEST_PROP(Schedule, EveryRowReadsItsOwnTokenAndNoTwoTokensOfAMacrobatchShareAPlaceInTheRing, ()) {
  const ScheduleCase c = draw_case(150);
  const Geometry& g = c.geometry;
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  std::set<std::pair<int, int>> pulled;
  for (std::int32_t pull = 0; pull < s.totals->pulls; ++pull) {
    RC_ASSERT(s.pull_source[pull].rank != c.rank);
    RC_ASSERT(pulled.emplace(s.pull_source[pull].rank, s.pull_source[pull].token).second);
  }
  for (std::int32_t tile = 0; tile < s.totals->tiles; ++tile) {
    const std::int32_t m = s.tiles[tile].macrobatch;
    const std::int64_t segment_begin = (m % g.segments) * g.segment_tokens;
    for (std::int64_t row = std::int64_t{tile} * kTileRows; row < tile * kTileRows + s.tiles[tile].rows; ++row) {
      const std::int32_t token = s.row_route[row].route / g.topk;
      const std::int32_t source = s.row_source[row];
      if (s.row_route[row].rank == c.rank) {
        RC_ASSERT(source == -1 - token);
        continue;
      }
      // A place in the ring belongs to one pull of the macrobatch, so distinct pulls have distinct places.
      RC_ASSERT(source >= segment_begin && source < segment_begin + g.segment_tokens);
      const std::int64_t pull = s.macrobatches[m].pull_begin + source - segment_begin;
      RC_ASSERT(pull < s.macrobatches[m + 1].pull_begin);
      RC_ASSERT(s.pull_source[pull].rank == s.row_route[row].rank && s.pull_source[pull].token == token);
    }
  }
}

RC_GTEST_PROP(Schedule, AMinibatchNeedsOnlyPullsUpToItsWatermark, ()) {
  const ScheduleCase c = draw_case(150);
  const Geometry& g = c.geometry;
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  std::vector<std::int32_t> latest(static_cast<std::size_t>(s.totals->minibatches), -1);
  for (std::int32_t tile = 0; tile < s.totals->tiles; ++tile) {
    const protocol::Tile& t = s.tiles[tile];
    const std::int64_t segment_begin = (t.macrobatch % g.segments) * g.segment_tokens;
    for (std::int64_t row = std::int64_t{tile} * kTileRows; row < tile * kTileRows + t.rows; ++row) {
      if (s.row_source[row] < 0) continue;
      const std::int64_t pull = s.macrobatches[t.macrobatch].pull_begin + s.row_source[row] - segment_begin;
      RC_ASSERT(pull < s.minibatches[t.minibatch + 1].pull_begin);
      std::int32_t& of_minibatch = latest[static_cast<std::size_t>(t.minibatch)];
      of_minibatch = std::max(of_minibatch, static_cast<std::int32_t>(pull));
    }
  }
  // And the watermark is tight: the last pull of a minibatch is used in it.
  for (std::int32_t q = 0; q < s.totals->minibatches; ++q) {
    const std::int32_t end = s.minibatches[q + 1].pull_begin;
    if (end > s.minibatches[q].pull_begin) RC_ASSERT(latest[static_cast<std::size_t>(q)] == end - 1);
  }
}

RC_GTEST_PROP(Schedule, StaysWithinTheSegmentAndTheBoundsOfTheGeometry, ()) {
  const ScheduleCase c = draw_case(200);
  const Geometry& g = c.geometry;
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  RC_ASSERT(s.totals->macrobatches >= 1 && s.totals->macrobatches <= g.max_macrobatches());
  RC_ASSERT(s.totals->minibatches <= g.max_minibatches());
  RC_ASSERT(s.totals->tiles <= g.max_tiles());
  RC_ASSERT(s.totals->pulls <= g.max_remote_tokens());
  RC_ASSERT(s.totals->groups <= g.max_groups() + g.max_local_experts());
  for (std::int32_t m = 0; m < s.totals->macrobatches; ++m) {
    const protocol::Macrobatch& now = s.macrobatches[m];
    const protocol::Macrobatch& next = s.macrobatches[m + 1];
    RC_ASSERT(next.pull_begin - now.pull_begin <= g.segment_tokens);
    RC_ASSERT((next.tile_begin - now.tile_begin) * std::int64_t{kTileRows} <= g.padded_segment_rows());
    RC_ASSERT(next.minibatch_begin - now.minibatch_begin >= g.min_minibatches());
    std::int64_t rows = 0;
    for (std::int32_t tile = now.tile_begin; tile < next.tile_begin; ++tile) rows += s.tiles[tile].rows;
    RC_ASSERT(rows <= g.segment_rows);
  }
  for (std::int32_t q = 0; q < s.totals->minibatches; ++q) {
    RC_ASSERT(s.minibatches[q + 1].tile_begin - s.minibatches[q].tile_begin <= g.minibatch_tiles);
  }
}

// ---- Single cases whose answer can be said in a line

TEST(Schedule, NoTokensAnywhereGivesOneEmptyMacrobatchAndEveryExpertIdleOnce) {
  for (const bool whole_ring : {true, false}) {
    Tuning tuning;
    if (!whole_ring) tuning.ring_tokens = 1;
    ScheduleCase c = make_case(1, {64, 64, 64}, 7, 2, tuning);
    c.tokens_per_rank = {0, 0, 0};
    c.ids.resize(3);
    BuiltSchedule built(c);
    built.build(c.ids, 3);
    const Schedule s = built.view();
    EXPECT_EQ(s.totals->macrobatches, 1);
    EXPECT_EQ(s.totals->minibatches, c.geometry.min_minibatches());
    EXPECT_EQ(s.totals->tiles, 0);
    EXPECT_EQ(s.totals->pulls, 0);
    ASSERT_EQ(s.totals->groups, 2);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(s.groups[i].expert, i);
      EXPECT_TRUE(s.groups[i].is_last);
      EXPECT_EQ(s.groups[i].previous, -1);
    }
    expect_model(c);
  }
}

TEST(Schedule, ARankWithoutExpertsHasNothingToDo) {
  ScheduleCase c = make_case(4, {5, 6, 7, 8, 9, 10}, 3, 2, {});
  c.ids = draw_ids(Routing::kUniform, c.tokens_per_rank, 3, 2, 1);
  BuiltSchedule built(c);
  built.build(c.ids, 2);
  EXPECT_EQ(built.view().totals->rows, 0);
  EXPECT_EQ(built.view().totals->groups, 0);
  expect_model(c);
}

TEST(Schedule, TheLowestBadRouteIsReportedWhoeverFindsIt) {
  ScheduleCase c = make_case(0, {40, 70, 70}, 6, 2, {});
  c.ids = draw_ids(Routing::kUniform, c.tokens_per_rank, 6, 2, 2);
  c.ids[2][3] = 6;
  c.ids[1][139] = -2;
  c.ids[1][100] = INT32_MAX;
  for (int rank = 0; rank < 3; ++rank) {
    c.rank = rank;
    for (const int workers : {1, 8}) {
      BuiltSchedule built(c);
      built.build(c.ids, workers);
      EXPECT_EQ(built.view().totals->bad_route, 1 * 70 * 2 + 100) << "rank " << rank;
    }
    expect_model(c);
  }
  c.ids[0][0] = INT32_MIN;
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  EXPECT_EQ(built.view().totals->bad_route, 0);
}

TEST(Schedule, ATokenWithAllItsRoutesOnOneRankIsPulledOnce) {
  ScheduleCase c = make_case(0, {0, 1}, 8, 4, {});
  c.ids = {{}, {3, 1, 3, 0}};
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  EXPECT_EQ(s.totals->rows, 4);
  EXPECT_EQ(s.totals->pulls, 1);
  EXPECT_EQ(s.totals->tiles, 3);
  expect_model(c);
}

TEST(Schedule, EverythingToOneExpertThroughTheSmallestRing) {
  for (int rank = 0; rank < 3; ++rank) {
    for (const auto& [tokens, rows] : {std::pair{1, 0}, {0, 1}, {1, 1}}) {
      Tuning tuning;
      tuning.minibatch_rows = 1;
      tuning.ring_tokens = tokens;
      tuning.ring_rows = rows;
      ScheduleCase c = make_case(rank, {700, 500, 0}, 5, 3, tuning);
      ASSERT_EQ(c.geometry.segments, 2);
      c.ids = draw_ids(Routing::kSingleExpert, c.tokens_per_rank, 5, 3, 3);
      expect_model(c);
    }
  }
}

}  // namespace
}  // namespace moewave::test
