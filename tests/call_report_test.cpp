// Promises of what a call is reported to have done, and of the hash by which ranks know that they run the same layer.
#include "layer/call_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "layer/configuration_hash.h"
#include "layer/scratch_places.h"
#include "plan/planner.h"
#include "protocol/layout.h"
#include "support/layer_case.h"

namespace moewave::test {
namespace {

protocol::Geometry geometry_of(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning = {}) {
  return plan::make_geometry(shape, ranks, max_tokens, plan::resolve_tuning(shape, ranks, max_tokens, tuning), 0);
}

// ---- Reports

TEST(CallReport, CountsWhatTheScheduleSays) {
  const protocol::Geometry geometry = geometry_of(make_shape(64, 32, 4, 2), 2, 8);
  // Rank 1 owns experts 2 and 3. Three rows: two of rank 0's token 0, one of its own token 5.
  protocol::ScheduleTotals totals{};
  totals.macrobatches = totals.minibatches = totals.pulls = 1;
  totals.tiles = 2;
  totals.rows = 3;
  std::vector<protocol::Tile> tiles = {{0, 2, 0, 0}, {1, 1, 0, 0}};
  std::vector<protocol::RouteRef> routes(2 * protocol::kTileRows, protocol::RouteRef{-7, -7});
  routes[0] = {0, 0};
  routes[1] = {1, 10};
  routes[protocol::kTileRows] = {0, 1};
  std::vector<protocol::TokenRef> pulls = {{0, 0}};
  const std::vector<std::int32_t> ids = {2, -1, 0, 99};  // one masked, one out of range
  ReportSource source{geometry, 1, false, 2, ids.data(), {}};
  source.schedule.totals = &totals;
  source.schedule.tiles = tiles.data();
  source.schedule.row_route = routes.data();
  source.schedule.pull_source = pulls.data();

  CallReport report = empty_call_report(geometry, false);
  const RankStats stats = describe_rank(source, &report);
  EXPECT_EQ(stats.tokens, 2);
  EXPECT_EQ(stats.routes, 2);
  EXPECT_EQ(stats.rows, 3);
  EXPECT_EQ(stats.padded_rows, 2 * protocol::kTileRows);
  EXPECT_EQ(stats.pulled_tokens, 1);
  EXPECT_EQ(stats.pulled_bytes, 128);
  EXPECT_EQ(stats.per_route_bytes, 2 * 128);
  EXPECT_EQ(stats.pushed_bytes, 2 * 128);
  EXPECT_EQ(report.pulled_bytes, (std::vector<std::int64_t>{0, 0, 128, 0}));
  EXPECT_EQ(report.pushed_bytes, (std::vector<std::int64_t>{0, 0, 256, 0}));
  EXPECT_EQ(report.expert_rows, (std::vector<std::int64_t>{0, 0, 2, 1}));
  source.backward = true;
  EXPECT_EQ(describe_rank(source, nullptr).pulled_bytes, 256);  // x and dout
}

// ---- Configuration

TEST(ConfigurationHash, IsTheSameForTheSameLayerAndAnotherForEveryOtherNumber) {
  const LayerShape shape = make_shape(64, 32, 8, 2, 16);
  const auto hash = [](const protocol::Geometry& geometry) { return configuration_hash(geometry); };
  EXPECT_EQ(hash(geometry_of(shape, 2, 100)), hash(geometry_of(shape, 2, 100)));
  std::vector<protocol::Geometry> others = {
      geometry_of(shape, 2, 100),
      geometry_of(shape, 3, 100),
      geometry_of(shape, 2, 101),
      geometry_of(make_shape(72, 32, 8, 2, 16), 2, 100),
      geometry_of(make_shape(64, 40, 8, 2, 16), 2, 100),
      geometry_of(make_shape(64, 32, 9, 2, 16), 2, 100),
      geometry_of(make_shape(64, 32, 8, 3, 16), 2, 100),
      geometry_of(make_shape(64, 32, 8, 2, 24), 2, 100),
      geometry_of(shape, 2, 100, {.minibatch_rows = 128}),
      geometry_of(shape, 2, 1000, {.ring_tokens = 64}),
      geometry_of(shape, 2, 1000, {.ring_rows = 256}),
  };
  std::set<std::uint64_t> hashes;
  for (const protocol::Geometry& geometry : others) hashes.insert(hash(geometry));
  EXPECT_EQ(hashes.size(), others.size());
}

TEST(ConfigurationHash, DoesNotDependOnTheSmsOfARank) {
  const LayerShape shape = make_shape(64, 32, 8, 2);
  EXPECT_EQ(configuration_hash(geometry_of(shape, 2, 100, {.minibatch_rows = 128, .sms = 4, .comm_sms = 1})),
            configuration_hash(geometry_of(shape, 2, 100, {.minibatch_rows = 128, .sms = 9, .comm_sms = 5})));
}

// ---- Poison

TEST(ScratchPlaces, LeaveOutWhatOutlivesACall) {
  const protocol::Layout layout(geometry_of(make_shape(64, 32, 8, 2, 16), 2, 100));
  std::vector<char> workspace(static_cast<std::size_t>(layout.workspace.bytes), 0);
  std::vector<char> shared(static_cast<std::size_t>(layout.shared.bytes), 0);
  const auto mark = [](void* base, const auto& place) {
    auto* first = reinterpret_cast<char*>(place.at(base));
    std::fill(first, first + place.bytes(), 1);
  };
  for_each_scratch_place(layout.workspace, workspace.data(), mark);
  for_each_scratch_place(layout.shared, shared.data(), mark);
  const auto is_untouched = [](void* base, const auto& place) {
    const auto* first = reinterpret_cast<const char*>(place.at(base));
    return std::all_of(first, first + place.bytes(), [](char c) { return c == 0; });
  };
  EXPECT_TRUE(is_untouched(workspace.data(), layout.workspace.epoch));
  EXPECT_TRUE(is_untouched(workspace.data(), layout.workspace.counters));
  EXPECT_TRUE(is_untouched(shared.data(), layout.shared.headers));
  EXPECT_TRUE(is_untouched(shared.data(), layout.shared.ids_flags));
  EXPECT_TRUE(is_untouched(shared.data(), layout.shared.x_flags));
  EXPECT_TRUE(is_untouched(shared.data(), layout.shared.exit_flags));
  EXPECT_TRUE(is_untouched(shared.data(), layout.shared.abort));
  // All else, but for the gaps between places.
  const auto marked = [](const std::vector<char>& memory) { return std::accumulate(memory.begin(), memory.end(), 0L); };
  const auto kept = layout.workspace.epoch.bytes() + layout.workspace.counters.bytes();
  EXPECT_GT(marked(workspace), layout.workspace.bytes - kept - 40 * protocol::kAlignment);
  EXPECT_GT(marked(shared), layout.shared.bytes - 20 * protocol::kAlignment);
}

}  // namespace
}  // namespace moewave::test
