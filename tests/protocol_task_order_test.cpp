// Promises of the task order: every task exactly once, and whatever the schedule, the ring and the number of workers,
// nothing waits for something that comes later and nothing is overwritten while it is read.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

#include "protocol/tasks.h"
#include "support/schedule_cases.h"
#include "support/task_simulator.h"

namespace moewave::test {
namespace {

using protocol::Geometry;
using protocol::kTileRows;
using protocol::Schedule;
using protocol::Task;
using protocol::TaskKind;
using protocol::TaskOrder;

using Key = std::tuple<TaskKind, std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

Key key_of(const Task& t) { return {t.kind, t.minibatch, t.tile, t.column, t.group}; }

// ---- All tasks there must be, listed kind by kind

void add_shared_tiles(std::set<Key>& all, TaskKind kind, std::int32_t own_tokens, std::int64_t columns) {
  for (std::int32_t tile = 0; tile < Geometry::blocks(own_tokens, kTileRows); ++tile) {
    for (std::int32_t column = 0; column < columns; ++column) all.insert({kind, -1, tile, column, -1});
  }
}

void add_tile(std::set<Key>& all, TaskKind kind, const Schedule& s, std::int32_t tile, std::int32_t columns) {
  for (std::int32_t column = 0; column < columns; ++column) {
    all.insert({kind, s.tiles[tile].minibatch, tile, column, -1});
  }
}

std::set<Key> forward_tasks(const Geometry& g, const Schedule& s, std::int32_t own_tokens) {
  std::set<Key> all;
  if (g.shared_intermediate > 0) {
    add_shared_tiles(all, TaskKind::kSharedGateUp, own_tokens,
                     Geometry::blocks(g.shared_intermediate, protocol::kGateUpColumns));
    add_shared_tiles(all, TaskKind::kSharedDown, own_tokens, g.down_blocks());
  }
  for (std::int32_t tile = 0; tile < s.totals->tiles; ++tile) {
    add_tile(all, TaskKind::kGateUp, s, tile, g.gate_up_blocks());
    add_tile(all, TaskKind::kDown, s, tile, g.down_blocks());
  }
  return all;
}

void add_shared_backward(std::set<Key>& all, const Geometry& g, std::int32_t own_tokens) {
  if (g.shared_intermediate == 0) return;
  if (g.saved_rows == 0) {
    add_shared_tiles(all, TaskKind::kSharedRecompute, own_tokens,
                     Geometry::blocks(g.shared_intermediate, protocol::kGateUpColumns));
  }
  add_shared_tiles(all, TaskKind::kSharedDh, own_tokens, Geometry::blocks(g.shared_intermediate, protocol::kDhColumns));
  add_shared_tiles(all, TaskKind::kSharedDx, own_tokens, g.dx_blocks());
  // Also without tokens: the gradient is then zero, and someone has to write it.
  for (std::int32_t block = 0; block < 3 * g.wgrad_blocks_of_matrix(g.shared_intermediate); ++block) {
    all.insert({TaskKind::kSharedWgrad, -1, -1, block, -1});
  }
}

std::set<Key> backward_tasks(const Geometry& g, const Schedule& s, std::int32_t own_tokens) {
  std::set<Key> all;
  add_shared_backward(all, g, own_tokens);
  for (std::int32_t tile = 0; tile < s.totals->tiles; ++tile) {
    const bool saved = (std::int64_t{tile} + 1) * kTileRows <= g.saved_rows;
    if (!saved) add_tile(all, TaskKind::kRecompute, s, tile, g.gate_up_blocks());
    add_tile(all, TaskKind::kDh, s, tile, g.dh_blocks());
    add_tile(all, TaskKind::kDx, s, tile, g.dx_blocks());
  }
  for (std::int32_t group = 0; group < s.totals->groups; ++group) {
    const bool idle = s.groups[group].tile_begin == s.groups[group].tile_end;
    const std::int32_t minibatch = idle ? s.totals->minibatches - 1 : s.tiles[s.groups[group].tile_end - 1].minibatch;
    for (std::int32_t block = 0; block < g.wgrad_blocks(); ++block) {
      all.insert({TaskKind::kWgrad, minibatch, -1, block, group});
    }
  }
  return all;
}

std::int32_t own_tokens_of(const ScheduleCase& c) { return c.tokens_per_rank[static_cast<std::size_t>(c.rank)]; }

RC_GTEST_PROP(TaskOrder, HoldsEveryTaskExactlyOnce, (bool backward)) {
  const ScheduleCase c = draw_case(150);
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  const TaskOrder order(c.geometry, s, own_tokens_of(c), backward);
  std::set<Key> seen;
  for (std::int64_t number = 0; number < order.size(); ++number) {
    RC_ASSERT(seen.insert(key_of(order.task(number))).second);
  }
  const std::set<Key> expected =
      backward ? backward_tasks(c.geometry, s, own_tokens_of(c)) : forward_tasks(c.geometry, s, own_tokens_of(c));
  RC_ASSERT(seen == expected);
}

// ---- Progress and reuse

void expect_run(bool backward, int workers, Pulls pulls) {
  const ScheduleCase c = draw_case(150);
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  TaskSimulator simulator(c.geometry, built.view(), own_tokens_of(c), backward);
  const std::string failure = simulator.run(workers, pulls, draw<std::uint32_t>(0, 1'000'000));
  if (!failure.empty()) RC_LOG() << c << '\n' << failure << '\n';
  RC_ASSERT(failure.empty());
  RC_TAG(built.view().totals->macrobatches > 2 ? "ring reused" : "ring not reused");
}

// One worker that takes a task only when it has ended the one before, and pulls that happen only when it is stuck: it
// gets through only if every task waits for nothing but tasks with lower numbers and pulls that those allow.
RC_GTEST_PROP(TaskOrder, NoTaskWaitsForALaterOneHoweverLateThePulls, (bool backward)) {
  expect_run(backward, 1, Pulls::kAsLateAsAllowed);
}

RC_GTEST_PROP(TaskOrder, NothingIsOverwrittenWhileItIsReadHoweverEarlyThePulls, (bool backward)) {
  expect_run(backward, draw(2, 12), Pulls::kAsEarlyAsAllowed);
}

RC_GTEST_PROP(TaskOrder, AnyInterleavingOfPullsAndWorkersEndsAndReadsTheRightData, (bool backward)) {
  expect_run(backward, draw(1, 12), Pulls::kAtRandom);
}

// Macrobatch 0 pulls, 1 to 3 hold the rank's own tokens alone, 4 pulls again. Macrobatch 2 lies between 0 and 4 in
// their segment and may end while 0 is still read.
TEST(TaskOrder, ASegmentIsNotReusedEarlyAcrossAMacrobatchWithoutPulls) {
  LayerShape shape;
  shape.hidden = shape.intermediate = 512;
  shape.experts = 8;
  shape.topk = 4;
  Tuning tuning;
  tuning.ring_rows = 1;
  ScheduleCase c;
  c.tokens_per_rank = {128, 128};
  c.geometry = plan::make_geometry(shape, 2, 128, plan::resolve_tuning(shape, 2, 128, tuning), 0);
  c.ids.assign(2, std::vector<std::int32_t>(128 * 4, 0));
  std::fill(c.ids[1].begin() + 32 * 4, c.ids[1].begin() + 96 * 4, 7);
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  ASSERT_EQ(s.totals->macrobatches, 6);
  for (std::int32_t m = 0; m < 6; ++m) {
    EXPECT_EQ(s.macrobatches[m + 1].pull_begin - s.macrobatches[m].pull_begin, m == 0 || m == 4 ? 32 : 0);
  }
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    for (const bool backward : {false, true}) {
      TaskSimulator simulator(c.geometry, s, 128, backward);
      EXPECT_EQ(simulator.run(12, Pulls::kAsEarlyAsAllowed, seed), "") << seed << (backward ? " backward" : " forward");
    }
  }
}

// One tile a macrobatch, so every second minibatch is empty: minibatch 3 lies between 0 and 6 in their slot of h.
TEST(TaskOrder, ASlotOfHIsNotReusedEarlyAcrossAnEmptyMinibatch) {
  LayerShape shape;
  shape.hidden = shape.intermediate = 512;
  shape.experts = 1;
  shape.topk = 1;
  Tuning tuning;
  tuning.minibatch_rows = 1;
  tuning.ring_tokens = 1;
  ScheduleCase c;
  c.tokens_per_rank = {0, 160};
  c.geometry = plan::make_geometry(shape, 2, 160, plan::resolve_tuning(shape, 2, 160, tuning), 0);
  c.ids = {{}, std::vector<std::int32_t>(160, 0)};
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  ASSERT_EQ(built.view().totals->macrobatches, 5);
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    TaskSimulator simulator(c.geometry, built.view(), 0, false);
    EXPECT_EQ(simulator.run(12, Pulls::kAsEarlyAsAllowed, seed), "") << seed;
  }
}

// ---- Interleaving and raster

RC_GTEST_PROP(Interleave, EveryPrefixHoldsTheProportionalShareOfBoth, ()) {
  const std::int64_t first = draw(0, 199);
  const std::int64_t second = draw(0, 199);
  const std::int64_t run = draw(1, 9);
  std::int64_t next_first = 0;
  std::int64_t next_second = 0;
  for (std::int64_t index = 0; index < first + second; ++index) {
    const protocol::Interleaved pick = protocol::interleave(index, first, second, run);
    RC_ASSERT(pick.index == (pick.is_first ? next_first : next_second));
    ++(pick.is_first ? next_first : next_second);
    // |firsts - prefix * first / all| < 2 runs, in whole numbers: one for the place of a run, one for the leftovers.
    RC_ASSERT(std::abs(next_first * (first + second) - (index + 1) * first) <
              (first + second) * (run == 1 ? 1 : 2 * run));
  }
  RC_ASSERT(next_first == first && next_second == second);
}

RC_GTEST_PROP(Interleave, GateUpAndDownOfAForwardStepAdvanceTogether, ()) {
  const ScheduleCase c = draw_case(150);
  BuiltSchedule built(c);
  built.build(c.ids, 1);
  const Schedule s = built.view();
  const TaskOrder order(c.geometry, s, own_tokens_of(c), false);
  const auto tiles_in = [&](std::int32_t q) {
    if (q < 0 || q >= s.totals->minibatches) return std::int64_t{0};
    return std::int64_t{s.minibatches[q + 1].tile_begin} - s.minibatches[q].tile_begin;
  };
  std::map<std::int32_t, std::pair<std::int64_t, std::int64_t>> taken;  // by step: gate-up and down
  std::int32_t last_step = 0;
  for (std::int64_t number = 0; number < order.size(); ++number) {
    const Task task = order.task(number);
    if (task.minibatch < 0) continue;
    const bool gate_up = task.kind == TaskKind::kGateUp;
    const std::int32_t step = gate_up ? task.minibatch : task.minibatch + 1;
    RC_ASSERT(step >= last_step);
    last_step = step;
    auto& [gate_ups, downs] = taken[step];
    ++(gate_up ? gate_ups : downs);
    const std::int64_t all_gate_ups = tiles_in(step) * c.geometry.gate_up_blocks();
    const std::int64_t all = all_gate_ups + tiles_in(step - 1) * c.geometry.down_blocks();
    RC_ASSERT(std::abs(gate_ups * all - (gate_ups + downs) * all_gate_ups) < all * 2 * c.geometry.interleave_tasks);
  }
}

RC_GTEST_PROP(Raster, VisitsEveryTileAndColumnOnceAndAllTilesOfAGroupBeforeTheNextColumn, ()) {
  const std::int32_t tiles = draw(1, 69);
  const std::int32_t columns = draw(1, 39);
  const std::int32_t most = draw(1, 39);
  const std::int32_t size = protocol::raster_group(tiles, most);
  RC_ASSERT(size <= most);
  RC_ASSERT(protocol::ceil_div(tiles, size) == protocol::ceil_div(tiles, most));  // no more groups than there must be
  std::set<std::pair<std::int32_t, std::int32_t>> seen;
  protocol::RasterPlace before{0, 0};
  for (std::int32_t index = 0; index < tiles * columns; ++index) {
    const protocol::RasterPlace place = protocol::raster(index, tiles, columns, most);
    RC_ASSERT(place.tile >= 0 && place.tile < tiles && place.column >= 0 && place.column < columns);
    RC_ASSERT(seen.emplace(place.tile, place.column).second);
    const std::int32_t group = place.tile / size;
    const std::int32_t group_before = before.tile / size;
    RC_ASSERT(group >= group_before);
    if (group == group_before) RC_ASSERT(place.column >= before.column);
    before = place;
  }
}

RC_GTEST_PROP(WgradBlocks, CoverEveryMatrixOnce, ()) {
  const std::int64_t hidden = 8 * draw(1, 119);
  const std::int64_t intermediate = 8 * draw(1, 119);
  Geometry g;
  g.hidden = hidden;
  g.intermediate = intermediate;
  std::set<std::tuple<int, std::int64_t, std::int64_t>> seen;
  for (std::int32_t number = 0; number < g.wgrad_blocks(); ++number) {
    const protocol::WgradBlock block = protocol::wgrad_block(hidden, intermediate, number);
    RC_ASSERT(block.matrix >= 0 && block.matrix < 3);
    RC_ASSERT(block.intermediate_begin % protocol::kWgradIntermediate == 0 && block.intermediate_begin < intermediate);
    RC_ASSERT(block.hidden_begin % protocol::kWgradHidden == 0 && block.hidden_begin < hidden);
    RC_ASSERT(seen.emplace(block.matrix, block.intermediate_begin, block.hidden_begin).second);
  }
  RC_ASSERT(static_cast<std::int64_t>(seen.size()) ==
            3 * protocol::ceil_div(hidden, protocol::kWgradHidden) *
                protocol::ceil_div(intermediate, protocol::kWgradIntermediate));
}

}  // namespace
}  // namespace moewave::test
