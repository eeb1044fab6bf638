// Promises of the layout: every place is aligned, large enough and its own, and offsets hold beyond 32 bits.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>

#include "protocol/layout.h"
#include "support/schedule_cases.h"

namespace moewave::test {
namespace {

using protocol::Geometry;
using protocol::Layout;
using protocol::Place;

// The layout and what lies in memory must mean the same to the host compiler and to the device compiler: no pointers,
// no sizes that depend on the platform, nothing to construct.
static_assert(std::is_trivially_copyable_v<Layout> && std::is_standard_layout_v<protocol::Counters>);
static_assert(sizeof(Place<Bf16>) == 16 && sizeof(Bf16) == 2);
static_assert(sizeof(protocol::EntryHeader) == 40 && std::is_trivially_copyable_v<protocol::EntryHeader>);
static_assert(sizeof(protocol::ScheduleTotals) == 40 && sizeof(protocol::Macrobatch) == 16);
static_assert(sizeof(protocol::Minibatch) == 16 && sizeof(protocol::Tile) == 16 && sizeof(protocol::WgradGroup) == 24);
static_assert(sizeof(protocol::RouteRef) == 8 && sizeof(protocol::TokenRef) == 8 && sizeof(protocol::BlockLoad) == 8);

struct Span {
  std::string name;
  std::int64_t offset;
  std::int64_t bytes;
};

template <typename T>
Span span_of(const char* name, const Place<T>& place) {
  return {name, place.offset, place.bytes()};
}

std::vector<Span> spans(const protocol::SharedLayout& l) {
  return {span_of("headers", l.headers),
          span_of("ids_flags", l.ids_flags),
          span_of("x_flags", l.x_flags),
          span_of("exit_flags", l.exit_flags),
          span_of("abort", l.abort),
          span_of("ids", l.ids),
          span_of("weights", l.weights),
          span_of("x", l.x),
          span_of("dout", l.dout),
          span_of("slots", l.slots),
          span_of("router_partials", l.router_partials)};
}

std::vector<Span> spans(const protocol::WorkspaceLayout& l) {
  return {span_of("epoch", l.epoch),
          span_of("counters", l.counters),
          span_of("tokens_per_rank", l.tokens_per_rank),
          span_of("local_expert", l.local_expert),
          span_of("block_rows", l.block_rows),
          span_of("block_pulls", l.block_pulls),
          span_of("block_load", l.block_load),
          span_of("group_rows", l.group_rows),
          span_of("group_pulls", l.group_pulls),
          span_of("group_tile", l.group_tile),
          span_of("group_pull", l.group_pull),
          span_of("last_group", l.last_group),
          span_of("ring_x", l.ring_x),
          span_of("ring_dout", l.ring_dout),
          span_of("hidden_ring", l.hidden_ring),
          span_of("dgate_up", l.dgate_up),
          span_of("weighted_hidden", l.weighted_hidden),
          span_of("recomputed", l.recomputed),
          span_of("carried_gate_up", l.carried_gate_up),
          span_of("carried_down", l.carried_down),
          span_of("shared_hidden", l.shared_hidden),
          span_of("shared_y", l.shared_y),
          span_of("shared_dgate_up", l.shared_dgate_up),
          span_of("shared_recomputed", l.shared_recomputed)};
}

std::vector<Span> spans(const protocol::ContextLayout& l) {
  return {span_of("totals", l.totals),
          span_of("macrobatches", l.macrobatches),
          span_of("minibatches", l.minibatches),
          span_of("tiles", l.tiles),
          span_of("groups", l.groups),
          span_of("row_source", l.row_source),
          span_of("row_route", l.row_route),
          span_of("pull_source", l.pull_source),
          span_of("tokens_per_rank", l.tokens_per_rank),
          span_of("gate_up", l.gate_up),
          span_of("shared_gate_up", l.shared_gate_up)};
}

// What stands in the way of `region`, empty if nothing.
template <typename Region>
std::string fault_of(const Region& region) {
  std::vector<Span> all = spans(region);
  std::stable_sort(all.begin(), all.end(), [](const Span& a, const Span& b) { return a.offset < b.offset; });
  std::int64_t end = 0;
  for (const Span& span : all) {
    if (span.bytes < 0) return span.name + " has a negative size";
    if (span.offset % protocol::kAlignment != 0) return span.name + " is not aligned";
    if (span.offset < end) return span.name + " overlaps the place before it";
    end = span.offset + span.bytes;
  }
  return end > region.bytes ? "places past the end of the region" : "";
}

void expect_sound(const Geometry& geometry) {
  const Layout layout(geometry);
  EXPECT_EQ(fault_of(layout.shared), "");
  EXPECT_EQ(fault_of(layout.workspace), "");
  EXPECT_EQ(fault_of(layout.context), "");
}

RC_GTEST_PROP(Layout, PlacesAreAlignedAndDoNotOverlap, ()) {
  const Layout layout(draw_case(2000).geometry);
  RC_ASSERT(fault_of(layout.shared) == "");
  RC_ASSERT(fault_of(layout.workspace) == "");
  RC_ASSERT(fault_of(layout.context) == "");
}

RC_GTEST_PROP(Layout, CountersOfOneKindFollowThoseOfAnother, ()) {
  const Geometry g = draw_case(2000).geometry;
  const protocol::Counters c(g);
  const std::int64_t shared_tiles = c.shared_recomputed - c.shared_hidden;
  const std::pair<std::int64_t, std::int64_t> ranges[] = {{c.pulled, g.max_minibatches()},
                                                          {c.hidden_done, g.max_tiles()},
                                                          {c.recomputed, g.max_tiles()},
                                                          {c.minibatch_done, g.max_minibatches()},
                                                          {c.token_reads, g.max_macrobatches()},
                                                          {c.row_reads, g.max_macrobatches()},
                                                          {c.recompute_reads, g.max_macrobatches()},
                                                          {c.shared_hidden, shared_tiles},
                                                          {c.shared_recomputed, shared_tiles},
                                                          {c.ticket, 1},
                                                          {c.staged, 1},
                                                          {c.arrived, 1},
                                                          {c.finished, 1}};
  std::int64_t next = 0;
  for (const auto& [begin, count] : ranges) {
    RC_ASSERT(begin == next);
    next += count;
  }
  RC_ASSERT(next == c.size);
  RC_ASSERT(shared_tiles == (g.shared_intermediate > 0 ? (g.max_tokens + protocol::kTileRows - 1) / protocol::kTileRows
                                                       : std::int64_t{0}));
}

RC_GTEST_PROP(Layout, HoldsWhatTheScheduleWrites, ()) {
  const Geometry g = draw_case(500).geometry;
  const Layout layout(g);
  RC_ASSERT(layout.context.macrobatches.count == g.max_macrobatches() + 1);
  RC_ASSERT(layout.context.minibatches.count == g.max_minibatches() + 1);
  RC_ASSERT(layout.context.row_source.count == g.max_tiles() * protocol::kTileRows);
  RC_ASSERT(layout.context.row_route.count == g.max_tiles() * protocol::kTileRows);
  RC_ASSERT(layout.context.pull_source.count == (g.ranks - 1) * g.max_tokens);
  RC_ASSERT(layout.workspace.local_expert.count == g.ranks * g.max_tokens * g.topk);
  RC_ASSERT(layout.workspace.ring_x.count == g.segments * g.segment_tokens * g.hidden);
  RC_ASSERT(layout.workspace.dgate_up.count == g.segments * g.padded_segment_rows() * 2 * g.intermediate);
}

Geometry huge_geometry(std::int64_t max_tokens, int ranks) {
  LayerShape shape;
  shape.hidden = 7168;
  shape.intermediate = 2048;
  shape.shared_intermediate = 2048;
  shape.experts = 256;
  shape.topk = 8;
  return plan::make_geometry(shape, ranks, max_tokens, plan::resolve_tuning(shape, ranks, max_tokens, {}), -1);
}

TEST(Layout, OffsetsHoldBeyondThirtyTwoBits) {
  const Geometry g = huge_geometry(300'000, 8);
  expect_sound(g);
  const Layout layout(g);
  EXPECT_EQ(layout.shared.x.count, std::int64_t{300'000} * 7168);
  EXPECT_GT(layout.shared.x.count, INT32_MAX);
  EXPECT_EQ(layout.shared.slots.count, std::int64_t{300'000} * 8 * 7168);
  EXPECT_GT(layout.shared.router_partials.offset, std::int64_t{300'000} * 10 * 7168 * 2);
  EXPECT_EQ(layout.workspace.ring_x.count, std::int64_t{7} * 300'000 * 7168);
  EXPECT_GE(layout.workspace.dgate_up.count, std::int64_t{8} * 300'000 * 8 * 2 * 2048);
  EXPECT_EQ(layout.context.gate_up.count, g.max_tiles() * protocol::kTileRows * 2 * 2048);

  // Rows on both sides of element 2^31 lie where they should.
  char* const base = nullptr;
  const std::int64_t row = (std::int64_t{1} << 31) / 7168 + 1;
  const auto address = [&](std::int64_t element) {
    return layout.shared.x.offset + element * static_cast<std::int64_t>(sizeof(Bf16));
  };
  EXPECT_EQ(reinterpret_cast<std::intptr_t>(layout.shared.x.at(static_cast<void*>(base)) + row * g.hidden),
            address(row * 7168));
}

TEST(Layout, AnEmptyLayerHasAnEmptyRingAndStillItsFlags) {
  const Geometry g = huge_geometry(0, 3);
  expect_sound(g);
  const Layout layout(g);
  EXPECT_EQ(layout.workspace.ring_x.count, 0);
  EXPECT_EQ(layout.shared.exit_flags.count, 3);
  EXPECT_GE(layout.context.minibatches.count, 2);
}

}  // namespace
}  // namespace moewave::test
