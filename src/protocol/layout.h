// Every size and offset of a rank's memory, compiled for host and device.
//
//   shared memory   what peers read and write: headers, flags, staged inputs, combine slots
//   workspace       what only this rank touches and nothing survives: counters, token ring, intermediates, scratch
//   context         what forward leaves for backward: the schedule and the saved pre-activations
#pragma once

#include <cstdint>

#include "moewave/bf16.h"
#include "protocol/entry.h"
#include "protocol/schedule.h"

namespace moewave::protocol {

inline constexpr std::int64_t kAlignment = 256;

/// A place in a region for `count` objects of type T.
template <typename T>
struct Place {
  std::int64_t offset = 0;
  std::int64_t count = 0;

  MOEWAVE_HD T* at(void* base) const { return reinterpret_cast<T*>(static_cast<char*>(base) + offset); }
  MOEWAVE_HD const T* at(const void* base) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(base) + offset);
  }
  MOEWAVE_HD std::int64_t bytes() const { return count * static_cast<std::int64_t>(sizeof(T)); }
};

/// Hands out aligned places one after another.
class Region {
 public:
  template <typename T>
  MOEWAVE_HD Place<T> take(std::int64_t count) {
    const Place<T> place{bytes_, count};
    bytes_ = round_up(bytes_ + place.bytes(), kAlignment);
    return place;
  }
  MOEWAVE_HD std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

/// One set of counters; the kernel uses the set of the epoch's parity and clears the other one.
struct Counters {
  std::int64_t pulled;             // [max_minibatches] pulls done
  std::int64_t hidden_done;        // [max_tiles] column blocks of h (forward) or dh (backward) done
  std::int64_t recomputed;         // [max_tiles] column blocks of recomputed g and u done
  std::int64_t minibatch_done;     // [max_minibatches] down tasks done: the slot of h is free
  std::int64_t token_reads;        // [max_macrobatches] readers of the token segment done
  std::int64_t row_reads;          // [max_macrobatches] readers of the gradient rows done
  std::int64_t recompute_reads;    // [max_macrobatches] readers of the recomputed rows done
  std::int64_t shared_hidden;      // [shared tiles]
  std::int64_t shared_recomputed;  // [shared tiles]
  std::int64_t ticket;             // the next task number
  std::int64_t staged;             // workers that have staged their part of x
  std::int64_t arrived;            // barrier of the rank's workers
  std::int64_t finished;           // workers that are done with everything remote
  std::int64_t size;

  MOEWAVE_HD explicit Counters(const Geometry& g) {
    std::int64_t next = 0;
    const std::int64_t minibatches = g.max_minibatches();
    const std::int64_t tiles = g.max_tiles();
    const std::int64_t macrobatches = g.max_macrobatches();
    const std::int64_t shared_tiles = g.shared_intermediate > 0 ? ceil_div(g.max_tokens, kTileRows) : 0;
    pulled = next, next += minibatches;
    hidden_done = next, next += tiles;
    recomputed = next, next += tiles;
    minibatch_done = next, next += minibatches;
    token_reads = next, next += macrobatches;
    row_reads = next, next += macrobatches;
    recompute_reads = next, next += macrobatches;
    shared_hidden = next, next += shared_tiles;
    shared_recomputed = next, next += shared_tiles;
    ticket = next++;
    staged = next++;
    arrived = next++;
    finished = next++;
    size = next;
  }
};

struct SharedLayout {
  Place<EntryHeader> headers;       // [2 parities][ranks]
  Place<std::uint32_t> ids_flags;   // [ranks] epoch whose ids and weights that rank has staged
  Place<std::uint32_t> x_flags;     // [ranks] epoch whose x (and dout) it has staged
  Place<std::uint32_t> exit_flags;  // [ranks] epoch in which it is done with everything remote
  Place<std::uint32_t> abort;       // [1] generation in which some rank gave up
  Place<std::int32_t> ids;          // [max_tokens * topk]
  Place<float> weights;             // [max_tokens * topk]
  Place<Bf16> x;                    // [max_tokens, hidden]
  Place<Bf16> dout;                 // [max_tokens, hidden]
  Place<Bf16> slots;                // [max_tokens * topk, hidden] combine (forward), dx rows (backward)
  Place<float> router_partials;     // [max_tokens * topk, dh_blocks]
  std::int64_t bytes;

  MOEWAVE_HD explicit SharedLayout(const Geometry& g) {
    Region region;
    const std::int64_t routes = g.max_tokens * g.topk;
    headers = region.take<EntryHeader>(2 * g.ranks);
    ids_flags = region.take<std::uint32_t>(g.ranks);
    x_flags = region.take<std::uint32_t>(g.ranks);
    exit_flags = region.take<std::uint32_t>(g.ranks);
    abort = region.take<std::uint32_t>(1);
    ids = region.take<std::int32_t>(routes);
    weights = region.take<float>(routes);
    x = region.take<Bf16>(g.max_tokens * g.hidden);
    dout = region.take<Bf16>(g.backward ? g.max_tokens * g.hidden : 0);
    slots = region.take<Bf16>(routes * g.hidden);
    router_partials = region.take<float>(g.backward ? routes * g.dh_blocks() : 0);
    bytes = region.bytes();
  }
};

/// A task with what a kernel needs of it and of its tile, so that one read fetches all.
struct alignas(16) TaskRecord {
  std::int32_t kind;  // TaskKind
  std::int32_t rows;  // valid rows of the tile
  std::int32_t expert;
  std::int32_t tile;
  std::int32_t column;
  std::int32_t minibatch;
  std::int32_t macrobatch;
  std::int32_t hidden_place;  // of the tile in the ring of h, in tiles
};

struct WorkspaceLayout {
  Place<std::uint32_t> epoch;           // [1] advanced by the kernel
  Place<std::uint32_t> counters;        // [2 parities][Counters::size]
  Place<std::int32_t> tokens_per_rank;  // [ranks]
  Place<std::int16_t> local_expert;
  Place<std::int32_t> block_rows;
  Place<std::int32_t> block_pulls;
  Place<BlockLoad> block_load;
  Place<std::int32_t> group_rows;
  Place<std::int32_t> group_pulls;
  Place<std::int32_t> group_tile;
  Place<std::int32_t> group_pull;
  Place<std::int32_t> last_group;
  Place<Bf16> ring_x;               // [segments * segment_tokens, hidden]
  Place<Bf16> ring_dout;            // the same
  Place<Bf16> hidden_ring;          // [kHiddenSlots * minibatch rows, padded_width(intermediate)]
  Place<Bf16> dgate_up;             // [segments * padded_segment_rows, 2 * intermediate]
  Place<Bf16> weighted_hidden;      // [segments * padded_segment_rows, intermediate] w * h
  Place<Bf16> recomputed;           // [segments * padded_segment_rows, 2 * intermediate]
  Place<float> carried_gate_up;     // [local experts, 2I, H] weight gradients carried over macrobatches
  Place<float> carried_down;        // [local experts, H, I]
  Place<Bf16> shared_hidden;        // [whole tiles, padded_width(shared_intermediate)] h; backward: w * h = h
  Place<std::uint32_t> task_count;  // [1]
  Place<TaskRecord> tasks;          // [max_forward_tasks] a kernel's list of them
  Place<Bf16> shared_y;             // [max_tokens, hidden] y (forward), dx (backward)
  Place<Bf16> shared_dgate_up;      // [max_tokens, 2 * shared_intermediate]
  Place<Bf16> shared_recomputed;    // [max_tokens, 2 * shared_intermediate]
  std::int64_t bytes;

  MOEWAVE_HD explicit WorkspaceLayout(const Geometry& g) {
    Region region;
    const std::int64_t experts = g.max_local_experts();
    const std::int64_t ring = g.segments * g.segment_tokens;
    const std::int64_t rows = g.backward ? g.segments * g.padded_segment_rows() : 0;
    const std::int64_t shared_tokens = g.shared_intermediate > 0 ? g.max_tokens : 0;
    const bool carries = g.backward && g.segments > 1;
    epoch = region.take<std::uint32_t>(1);
    counters = region.take<std::uint32_t>(2 * Counters(g).size);
    tokens_per_rank = region.take<std::int32_t>(g.ranks);
    local_expert = region.take<std::int16_t>(g.max_valid_rows());
    block_rows = region.take<std::int32_t>(g.max_blocks() * experts);
    block_pulls = region.take<std::int32_t>(g.max_blocks() * experts);
    block_load = region.take<BlockLoad>(g.max_blocks());
    group_rows = region.take<std::int32_t>(g.max_groups());
    group_pulls = region.take<std::int32_t>(g.max_groups());
    group_tile = region.take<std::int32_t>(g.max_groups());
    group_pull = region.take<std::int32_t>(g.max_groups());
    last_group = region.take<std::int32_t>(experts);
    ring_x = region.take<Bf16>(ring * g.hidden);
    ring_dout = region.take<Bf16>(g.backward ? ring * g.hidden : 0);
    hidden_ring = region.take<Bf16>(kHiddenSlots * g.minibatch_rows() * Geometry::padded_width(g.intermediate));
    dgate_up = region.take<Bf16>(rows * 2 * g.intermediate);
    weighted_hidden = region.take<Bf16>(rows * g.intermediate);
    recomputed = region.take<Bf16>(g.saved_rows >= g.max_tiles() * kTileRows ? 0 : rows * 2 * g.intermediate);
    carried_gate_up = region.take<float>(carries ? experts * 2 * g.intermediate * g.hidden : 0);
    carried_down = region.take<float>(carries ? experts * g.intermediate * g.hidden : 0);
    task_count = region.take<std::uint32_t>(1);
    tasks = region.take<TaskRecord>(g.max_forward_tasks());
    shared_hidden =
        region.take<Bf16>(round_up(shared_tokens, kTileRows) * Geometry::padded_width(g.shared_intermediate));
    shared_y = region.take<Bf16>(shared_tokens * g.hidden);
    shared_dgate_up = region.take<Bf16>(g.backward ? shared_tokens * 2 * g.shared_intermediate : 0);
    shared_recomputed = region.take<Bf16>(g.saved_rows == 0 ? shared_tokens * 2 * g.shared_intermediate : 0);
    bytes = region.bytes();
  }

  MOEWAVE_HD ScheduleScratch scratch(void* base) const {
    return {local_expert.at(base), block_rows.at(base), block_pulls.at(base), block_load.at(base), group_rows.at(base),
            group_pulls.at(base),  group_tile.at(base), group_pull.at(base),  last_group.at(base)};
  }
};

struct ContextLayout {
  Place<ScheduleTotals> totals;
  Place<Macrobatch> macrobatches;
  Place<Minibatch> minibatches;
  Place<Tile> tiles;
  Place<WgradGroup> groups;
  Place<std::int32_t> row_source;
  Place<RouteRef> row_route;
  Place<TokenRef> pull_source;
  Place<std::int32_t> tokens_per_rank;  // [ranks] of the call that wrote it
  Place<Bf16> gate_up;                  // [saved_rows, 2 * intermediate]
  Place<Bf16> shared_gate_up;           // [max_tokens, 2 * shared_intermediate], when rows are saved
  std::int64_t bytes;

  MOEWAVE_HD explicit ContextLayout(const Geometry& g) {
    Region region;
    totals = region.take<ScheduleTotals>(1);
    macrobatches = region.take<Macrobatch>(g.max_macrobatches() + 1);
    minibatches = region.take<Minibatch>(g.max_minibatches() + 1);
    tiles = region.take<Tile>(g.max_tiles());
    groups = region.take<WgradGroup>(g.max_groups() + g.max_local_experts());
    row_source = region.take<std::int32_t>(g.max_tiles() * kTileRows);
    row_route = region.take<RouteRef>(g.max_tiles() * kTileRows);
    pull_source = region.take<TokenRef>(g.max_remote_tokens());
    tokens_per_rank = region.take<std::int32_t>(g.ranks);
    gate_up = region.take<Bf16>(g.saved_rows * 2 * g.intermediate);
    shared_gate_up = region.take<Bf16>(g.saved_rows == 0 ? 0 : g.max_tokens * 2 * g.shared_intermediate);
    bytes = region.bytes();
  }

  MOEWAVE_HD Schedule schedule(void* base) const {
    return {totals.at(base), macrobatches.at(base), minibatches.at(base), tiles.at(base),
            groups.at(base), row_source.at(base),   row_route.at(base),   pull_source.at(base)};
  }
};

struct Layout {
  Geometry geometry;
  Counters counters;
  SharedLayout shared;
  WorkspaceLayout workspace;
  ContextLayout context;

  MOEWAVE_HD explicit Layout(const Geometry& g) : geometry(g), counters(g), shared(g), workspace(g), context(g) {}
};

/// What a kernel knows of its peers, and all it knows: base addresses of their shared memory.
struct PointerTable {
  int rank;
  int size;
  void* const* base;  // [size], base[rank] is its own
};

}  // namespace moewave::protocol
