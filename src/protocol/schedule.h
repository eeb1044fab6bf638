// The schedule of one rank: which rows its experts compute, where each row's token comes from, where its result goes,
// and in which order remote tokens are pulled. Built by all workers of the rank (SMs' warps, or threads) from all
// ranks' ids.
//
// Rows are sorted by (macrobatch, local expert, place of the token in the token order, slot), stable and independent of
// the number of workers, and each (macrobatch, expert) group is padded to whole tiles. A remote token is pulled once,
// for its first use: the first of its rows in that order. So the pull list is sorted by (macrobatch, lowest local
// expert of the token, place) and comes out of the same counting sort.
//
// Six phases, with a barrier of the rank's workers after each:
//   count_block         every block     rows and first uses of each local expert, by block of the token order
//   cut_macrobatches    one worker      ranges of blocks whose tokens and rows fit a segment
//   offsets_of_experts  every column    exclusive sums along the blocks of a macrobatch
//   assign_groups       one worker      first tile and first pull of each (macrobatch, expert), minibatches, groups
//   place_block         every block     row and pull tables
//   fill_tiles          every expert    tile table (with place_block)
//   finish_schedule     one worker      first pull and first wgrad group of each minibatch
//
// The cost is linear in routes: a block has up to kOrderBlockTokens * topk routes and one counter a local expert.
#pragma once

#include <cstdint>

#include "protocol/atomics.h"
#include "protocol/division.h"
#include "protocol/geometry.h"
#include "protocol/lanes.h"
#include "protocol/token_order.h"

namespace moewave::protocol {

struct TokenRef {
  std::int32_t rank;
  std::int32_t token;
};

/// A route at its owner: token * topk + slot, which is also the number of its combine slot.
struct RouteRef {
  std::int32_t rank;
  std::int32_t route;
};

struct Macrobatch {
  std::int32_t block_begin;
  std::int32_t tile_begin;
  std::int32_t pull_begin;
  std::int32_t minibatch_begin;
};

struct Minibatch {
  std::int32_t tile_begin;
  std::int32_t pull_begin;   // pulls before this minibatch
  std::int32_t group_begin;  // wgrad groups whose last tile lies before this minibatch
  std::int32_t macrobatch;
};

struct Tile {
  std::int32_t expert;  // local number
  std::int32_t rows;    // valid rows, 1 to kTileRows
  std::int32_t macrobatch;
  std::int32_t minibatch;
};

/// All rows of one expert in one macrobatch. An expert without any row has one group without tiles, at the very end.
struct WgradGroup {
  std::int32_t expert;
  std::int32_t tile_begin;
  std::int32_t tile_end;
  std::int32_t macrobatch;
  std::int32_t previous;  // macrobatch of this expert's group before this one, -1: this is its first
  bool is_last;           // of this expert
};

inline constexpr std::int64_t kNoBadRoute = INT64_MAX;

struct ScheduleTotals {
  std::int32_t macrobatches;
  std::int32_t minibatches;
  std::int32_t tiles;
  std::int32_t pulls;
  std::int32_t groups;
  std::int64_t rows;
  std::int64_t bad_route;  // lowest rank * max_tokens * topk + route whose id is outside -1..experts-1
};

struct BlockLoad {
  std::int32_t tokens;  // remote tokens needed here
  std::int32_t rows;
};

/// Results, kept for backward. Arrays marked + have one more entry, the end of the last.
struct Schedule {
  ScheduleTotals* totals;
  Macrobatch* macrobatches;  // [max_macrobatches] +
  Minibatch* minibatches;    // [max_minibatches] +
  Tile* tiles;               // [max_tiles]
  WgradGroup* groups;        // [max_groups + max_local_experts]
  std::int32_t* row_source;  // [max_tiles * kTileRows]: place in the token ring, or -1 - token for the rank's own
  RouteRef* row_route;       // [max_tiles * kTileRows]; rows past a tile's valid rows are not written
  TokenRef* pull_source;     // [max_remote_tokens]
};

/// Memory that the phases use among themselves.
struct ScheduleScratch {
  std::int16_t* local_expert;  // [ranks][max_tokens * topk]: local expert of each route, -1: not ours
  std::int32_t* block_rows;    // [max_blocks][max_local_experts]
  std::int32_t* block_pulls;   // [max_blocks][max_local_experts]
  BlockLoad* block_load;       // [max_blocks]
  std::int32_t* group_rows;    // [max_groups], and so on
  std::int32_t* group_pulls;
  std::int32_t* group_tile;
  std::int32_t* group_pull;
  std::int32_t* last_group;  // [max_local_experts]
};

/// A block's lanes hand each other the tokens' places here (shared memory on the GPU).
struct PlaceScratch {
  std::int32_t position[kOrderBlockTokens];
  std::int32_t first_use[kOrderBlockTokens];
};

/// One rank's view while it builds its schedule.
struct ScheduleTask {
  Geometry geometry;
  int rank;
  const std::int32_t* tokens_per_rank;  // [ranks]
  Schedule schedule;
  ScheduleScratch scratch;

  MOEWAVE_HD std::int32_t experts() const { return expert_count(geometry.experts, geometry.ranks, rank); }
  MOEWAVE_HD std::int32_t blocks() const { return total_blocks(tokens_per_rank, geometry.ranks); }
  MOEWAVE_HD std::int64_t routes_of_rank(int source) const { return source * geometry.max_tokens * geometry.topk; }
};

/// The lowest local expert among a token's routes; -1: none is ours.
MOEWAVE_HD inline std::int32_t first_use_of_token(const std::int16_t* local_expert, std::int32_t topk) {
  std::int32_t lowest = -1;
  for (std::int32_t slot = 0; slot < topk; ++slot) {
    const std::int32_t expert = local_expert[slot];
    if (expert >= 0 && (lowest < 0 || expert < lowest)) lowest = expert;
  }
  return lowest;
}

/// A block of the token order with everything that the counting and the placing pass need of it.
struct BlockView {
  SourceBlock source;
  std::int32_t place;   // in the token order
  std::int32_t tokens;  // in this block
  std::int32_t first_token;
  std::int64_t first_route;
  std::int16_t* local_expert;  // of the block's routes
};

MOEWAVE_HD inline BlockView view_block(const ScheduleTask& task, SourceBlock source) {
  BlockView view;
  view.source = source;
  view.place = order_of_block(task.tokens_per_rank, task.geometry.ranks, task.rank, source.rank, source.block);
  view.first_token = source.block * kOrderBlockTokens;
  view.tokens =
      static_cast<std::int32_t>(min64(kOrderBlockTokens, task.tokens_per_rank[source.rank] - view.first_token));
  view.first_route = std::int64_t{view.first_token} * task.geometry.topk;
  view.local_expert = task.scratch.local_expert + task.routes_of_rank(source.rank) + view.first_route;
  return view;
}

/// Phase 1. `ids` are the source rank's staged ids, possibly in a peer's memory: each is read once.
template <typename Lanes>
MOEWAVE_HD void count_block(const ScheduleTask& task, SourceBlock source, const std::int32_t* ids) {
  const BlockView block = view_block(task, source);
  const std::int32_t experts = task.experts();
  const std::int32_t first = first_expert(task.geometry.experts, task.geometry.ranks, task.rank);
  const std::int32_t topk = task.geometry.topk;
  std::int32_t* rows = task.scratch.block_rows + std::int64_t{block.place} * experts;
  std::int32_t* pulls = task.scratch.block_pulls + std::int64_t{block.place} * experts;
  for (std::int32_t expert = Lanes::id(); expert < experts; expert += Lanes::width()) rows[expert] = pulls[expert] = 0;
  Lanes::sync();

  const std::int32_t routes = block.tokens * topk;
  std::int64_t my_rows = 0;
  for (std::int32_t base = 0; base < routes; base += Lanes::width()) {
    const std::int32_t route = base + Lanes::id();
    const bool exists = route < routes;
    const std::int32_t id = exists ? ids[block.first_route + route] : -1;
    if (id < -1 || id >= task.geometry.experts) {
      atomic_min(&task.schedule.totals->bad_route, task.routes_of_rank(source.rank) + block.first_route + route);
    }
    const bool ours = id >= first && id < first + experts;
    const std::int32_t expert = ours ? id - first : -1;
    if (exists) block.local_expert[route] = static_cast<std::int16_t>(expert);
    const Match match = Lanes::match(expert, ours);
    if (ours && match.is_first) rows[expert] += match.count;
    my_rows += ours ? 1 : 0;
    Lanes::sync();
  }

  const bool remote = source.rank != task.rank;
  std::int64_t my_pulls = 0;
  for (std::int32_t base = 0; remote && base < block.tokens; base += Lanes::width()) {
    const std::int32_t token = base + Lanes::id();
    const std::int32_t expert =
        token < block.tokens ? first_use_of_token(block.local_expert + std::int64_t{token} * topk, topk) : -1;
    const Match match = Lanes::match(expert, expert >= 0);
    if (expert >= 0 && match.is_first) pulls[expert] += match.count;
    my_pulls += expert >= 0 ? 1 : 0;
    Lanes::sync();
  }

  std::int64_t all_rows = 0;
  std::int64_t all_pulls = 0;
  Lanes::exclusive_sum(my_rows, all_rows);
  Lanes::exclusive_sum(my_pulls, all_pulls);
  if (Lanes::id() == 0) {
    task.scratch.block_load[block.place] = {static_cast<std::int32_t>(all_pulls), static_cast<std::int32_t>(all_rows)};
  }
}

/// Phase 2. Greedy: a macrobatch takes blocks until the next would not fit its segment. A segment holds at least one
/// block (make_geometry sees to it), so every macrobatch has one, and two neighbours together exceed a segment.
template <typename Lanes>
MOEWAVE_HD void cut_macrobatches(const ScheduleTask& task) {
  const std::int32_t blocks = task.blocks();
  Macrobatch* macrobatches = task.schedule.macrobatches;
  if (task.geometry.segments == 1) {
    if (Lanes::id() == 0) {
      macrobatches[0].block_begin = 0;
      macrobatches[1].block_begin = blocks;
      task.schedule.totals->macrobatches = 1;
    }
    return;
  }
  std::int32_t current = 0;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;
  if (Lanes::id() == 0) macrobatches[0].block_begin = 0;
  for (std::int32_t base = 0; base < blocks; base += Lanes::width()) {
    const std::int32_t block = base + Lanes::id();
    const BlockLoad load = block < blocks ? task.scratch.block_load[block] : BlockLoad{0, 0};
    for (int start = 0; start < Lanes::width();) {
      const bool counts = Lanes::id() >= start;
      std::int64_t all_tokens = 0;
      std::int64_t all_rows = 0;
      const std::int64_t tokens_before = tokens + Lanes::exclusive_sum(counts ? load.tokens : 0, all_tokens);
      const std::int64_t rows_before = rows + Lanes::exclusive_sum(counts ? load.rows : 0, all_rows);
      const bool too_many = tokens_before + load.tokens > task.geometry.segment_tokens ||
                            rows_before + load.rows > task.geometry.segment_rows;
      const int next = Lanes::first_true(counts && too_many);
      if (next == Lanes::width()) {
        tokens += all_tokens;
        rows += all_rows;
        break;
      }
      ++current;
      if (Lanes::id() == 0) macrobatches[current].block_begin = base + next;
      tokens = rows = 0;
      start = next;
    }
  }
  if (Lanes::id() == 0) {
    macrobatches[current + 1].block_begin = blocks;
    task.schedule.totals->macrobatches = current + 1;
  }
}

// Experts that one call of offsets_of_experts takes. A single lane walks down many columns of the counts at once, since
// they lie side by side; many lanes share one column.
template <typename Lanes>
inline constexpr std::int32_t kColumnExperts = Lanes::width() == 1 ? 32 : 1;

template <typename Lanes>
MOEWAVE_HD std::int32_t columns_of_macrobatch(const ScheduleTask& task) {
  return static_cast<std::int32_t>(ceil_div(task.experts(), kColumnExperts<Lanes>));
}

/// Phase 3. Turns the counts of one macrobatch and up to kColumnExperts experts into exclusive sums along the blocks.
/// Each lane has a range of the blocks.
template <typename Lanes>
MOEWAVE_HD void offsets_of_experts(const ScheduleTask& task, std::int32_t macrobatch, std::int32_t column) {
  constexpr std::int32_t kExperts = kColumnExperts<Lanes>;
  const std::int32_t experts = task.experts();
  const std::int32_t first = column * kExperts;
  const std::int32_t count = static_cast<std::int32_t>(min64(kExperts, experts - first));
  const std::int32_t begin = task.schedule.macrobatches[macrobatch].block_begin;
  const std::int32_t blocks = task.schedule.macrobatches[macrobatch + 1].block_begin - begin;
  const std::int32_t lane_begin =
      begin + static_cast<std::int32_t>(std::int64_t{blocks} * Lanes::id() / Lanes::width());
  const std::int32_t lane_end =
      begin + static_cast<std::int32_t>(std::int64_t{blocks} * (Lanes::id() + 1) / Lanes::width());
  std::int32_t* block_rows = task.scratch.block_rows + first;
  std::int32_t* block_pulls = task.scratch.block_pulls + first;

  std::int32_t rows[kExperts] = {};
  std::int32_t pulls[kExperts] = {};
  if constexpr (Lanes::width() > 1) {
    for (std::int32_t block = lane_begin; block < lane_end; ++block) {
      rows[0] += block_rows[std::int64_t{block} * experts];
      pulls[0] += block_pulls[std::int64_t{block} * experts];
    }
    std::int64_t all = 0;
    rows[0] = static_cast<std::int32_t>(Lanes::exclusive_sum(rows[0], all));
    pulls[0] = static_cast<std::int32_t>(Lanes::exclusive_sum(pulls[0], all));
  }
  for (std::int32_t block = lane_begin; block < lane_end; ++block) {
    std::int32_t* of_rows = block_rows + std::int64_t{block} * experts;
    std::int32_t* of_pulls = block_pulls + std::int64_t{block} * experts;
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t counted_rows = of_rows[i];
      const std::int32_t counted_pulls = of_pulls[i];
      of_rows[i] = rows[i];
      of_pulls[i] = pulls[i];
      rows[i] += counted_rows;
      pulls[i] += counted_pulls;
    }
  }
  if (Lanes::id() + 1 != Lanes::width()) return;
  for (std::int32_t i = 0; i < count; ++i) {
    task.scratch.group_rows[std::int64_t{macrobatch} * experts + first + i] = rows[i];
    task.scratch.group_pulls[std::int64_t{macrobatch} * experts + first + i] = pulls[i];
  }
}

MOEWAVE_HD inline std::int32_t minibatch_of_tile(const Geometry& geometry, const Macrobatch& macrobatch,
                                                 std::int32_t tile) {
  return macrobatch.minibatch_begin + (tile - macrobatch.tile_begin) / geometry.minibatch_tiles;
}

/// Phase 4. The minibatches' pull_begin and group_begin are counts until finish_schedule sums them.
template <typename Lanes>
MOEWAVE_HD void assign_groups(const ScheduleTask& task) {
  const Geometry& geometry = task.geometry;
  const Schedule& schedule = task.schedule;
  const ScheduleScratch& scratch = task.scratch;
  const std::int32_t experts = task.experts();
  for (std::int32_t expert = Lanes::id(); expert < experts; expert += Lanes::width()) scratch.last_group[expert] = -1;

  std::int64_t tiles = 0;
  std::int64_t pulls = 0;
  std::int64_t rows = 0;
  std::int64_t groups = 0;
  std::int32_t minibatches = 0;
  const std::int32_t macrobatches = schedule.totals->macrobatches;
  for (std::int32_t m = 0; m < macrobatches; ++m) {
    Macrobatch macrobatch{schedule.macrobatches[m].block_begin, static_cast<std::int32_t>(tiles),
                          static_cast<std::int32_t>(pulls), minibatches};
    if (Lanes::id() == 0) schedule.macrobatches[m] = macrobatch;
    const std::int64_t first_group = groups;
    for (std::int32_t base = 0; base < experts; base += Lanes::width()) {
      const std::int32_t expert = base + Lanes::id();
      const std::int64_t at = std::int64_t{m} * experts + expert;
      const std::int64_t group_rows = expert < experts ? scratch.group_rows[at] : 0;
      const std::int64_t group_pulls = expert < experts ? scratch.group_pulls[at] : 0;
      const std::int64_t group_tiles = ceil_div(group_rows, kTileRows);
      std::int64_t all_tiles = 0;
      std::int64_t all_pulls = 0;
      std::int64_t all_groups = 0;
      std::int64_t all_rows = 0;
      const std::int64_t tile = tiles + Lanes::exclusive_sum(group_tiles, all_tiles);
      const std::int64_t pull = pulls + Lanes::exclusive_sum(group_pulls, all_pulls);
      const std::int64_t group = groups + Lanes::exclusive_sum(group_tiles > 0 ? 1 : 0, all_groups);
      Lanes::exclusive_sum(group_rows, all_rows);
      if (expert < experts) {
        scratch.group_tile[at] = static_cast<std::int32_t>(tile);
        scratch.group_pull[at] = static_cast<std::int32_t>(pull);
      }
      if (group_tiles > 0) {
        const std::int32_t last = scratch.last_group[expert];
        const std::int32_t previous = last < 0 ? -1 : schedule.groups[last].macrobatch;
        schedule.groups[group] = {
            expert, static_cast<std::int32_t>(tile), static_cast<std::int32_t>(tile + group_tiles), m, previous, false};
        scratch.last_group[expert] = static_cast<std::int32_t>(group);
      }
      tiles += all_tiles;
      pulls += all_pulls;
      groups += all_groups;
      rows += all_rows;
    }
    const std::int32_t macrobatch_tiles = static_cast<std::int32_t>(tiles) - macrobatch.tile_begin;
    const std::int32_t count = static_cast<std::int32_t>(
        max64(geometry.min_minibatches(),
              quotient(macrobatch_tiles + geometry.minibatch_tiles - 1, geometry.minibatch_tiles)));
    for (std::int32_t i = Lanes::id(); i < count; i += Lanes::width()) {
      const std::int64_t begin = min64(macrobatch_tiles, std::int64_t{i} * geometry.minibatch_tiles);
      schedule.minibatches[minibatches + i] = {macrobatch.tile_begin + static_cast<std::int32_t>(begin), 0, 0, m};
    }
    Lanes::sync();
    for (std::int64_t group = first_group + Lanes::id(); group < groups; group += Lanes::width()) {
      const std::int32_t last_tile = schedule.groups[group].tile_end - 1;
      atomic_add(&schedule.minibatches[minibatch_of_tile(geometry, macrobatch, last_tile)].group_begin, 1);
    }
    minibatches += count;
    Lanes::sync();
  }

  for (std::int32_t base = 0; base < experts; base += Lanes::width()) {
    const std::int32_t expert = base + Lanes::id();
    const bool idle = expert < experts && scratch.last_group[expert] < 0;
    if (expert < experts && !idle) schedule.groups[scratch.last_group[expert]].is_last = true;
    std::int64_t all_idle = 0;
    const std::int64_t group = groups + Lanes::exclusive_sum(idle ? 1 : 0, all_idle);
    const std::int32_t end = static_cast<std::int32_t>(tiles);
    if (idle) schedule.groups[group] = {expert, end, end, macrobatches - 1, -1, true};
    groups += all_idle;
    if (Lanes::id() == 0) {
      atomic_add(&schedule.minibatches[minibatches - 1].group_begin, static_cast<std::int32_t>(all_idle));
    }
  }
  if (Lanes::id() == 0) {
    const std::int32_t end = static_cast<std::int32_t>(tiles);
    schedule.macrobatches[macrobatches] = {task.blocks(), end, static_cast<std::int32_t>(pulls), minibatches};
    schedule.minibatches[minibatches] = {end, 0, 0, macrobatches};
    schedule.totals->minibatches = minibatches;
    schedule.totals->tiles = end;
    schedule.totals->pulls = static_cast<std::int32_t>(pulls);
    schedule.totals->groups = static_cast<std::int32_t>(groups);
    schedule.totals->rows = rows;
  }
  Lanes::sync();
}

/// The macrobatch that holds place `block` of the token order.
MOEWAVE_HD inline std::int32_t macrobatch_of_block(const Schedule& schedule, std::int32_t block) {
  std::int32_t low = 0;
  std::int32_t high = schedule.totals->macrobatches - 1;
  while (low < high) {
    const std::int32_t middle = (low + high + 1) / 2;
    if (schedule.macrobatches[middle].block_begin <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// Phase 5, for every block: writes row_source, row_route and pull_source, and counts the pulls of each minibatch.
template <typename Lanes>
MOEWAVE_HD void place_block(const ScheduleTask& task, SourceBlock source, PlaceScratch& places) {
  const BlockView block = view_block(task, source);
  const Geometry& geometry = task.geometry;
  const Schedule& schedule = task.schedule;
  const std::int32_t experts = task.experts();
  const std::int32_t topk = geometry.topk;
  const std::int32_t m = macrobatch_of_block(schedule, block.place);
  const Macrobatch& macrobatch = schedule.macrobatches[m];
  const std::int32_t* group_tile = task.scratch.group_tile + std::int64_t{m} * experts;
  const std::int32_t* group_pull = task.scratch.group_pull + std::int64_t{m} * experts;
  std::int32_t* rows = task.scratch.block_rows + std::int64_t{block.place} * experts;
  std::int32_t* pulls = task.scratch.block_pulls + std::int64_t{block.place} * experts;
  const bool remote = source.rank != task.rank;
  const std::int64_t segment_begin = (m % geometry.segments) * geometry.segment_tokens;

  for (std::int32_t base = 0; base < block.tokens; base += Lanes::width()) {
    const std::int32_t token = base + Lanes::id();
    const bool exists = token < block.tokens;
    const std::int32_t expert =
        remote && exists ? first_use_of_token(block.local_expert + std::int64_t{token} * topk, topk) : -1;
    const Match match = Lanes::match(expert, expert >= 0);
    const std::int32_t pull = expert >= 0 ? group_pull[expert] + pulls[expert] + match.rank : 0;
    Lanes::sync();
    if (expert >= 0 && match.is_first) pulls[expert] += match.count;
    if (expert >= 0) schedule.pull_source[pull] = {source.rank, block.first_token + token};
    if (exists) {
      const std::int64_t copy = segment_begin + pull - macrobatch.pull_begin;
      places.position[token] = remote ? static_cast<std::int32_t>(copy) : -1 - (block.first_token + token);
      places.first_use[token] = expert;
    }
    Lanes::sync();
  }

  const std::int32_t routes = block.tokens * topk;
  for (std::int32_t base = 0; base < routes; base += Lanes::width()) {
    const std::int32_t route = base + Lanes::id();
    const std::int32_t expert = route < routes ? block.local_expert[route] : -1;
    const bool ours = expert >= 0;
    const Match match = Lanes::match(expert, ours);
    const std::int32_t in_group = ours ? rows[expert] + match.rank : 0;
    Lanes::sync();
    if (ours && match.is_first) rows[expert] += match.count;
    if (ours) {
      const std::int32_t token = route / topk;
      const std::int64_t row = std::int64_t{group_tile[expert]} * kTileRows + in_group;
      schedule.row_source[row] = places.position[token];
      schedule.row_route[row] = {source.rank, static_cast<std::int32_t>(block.first_route + route)};
      bool first_use = expert == places.first_use[token];
      for (std::int32_t earlier = token * topk; first_use && earlier < route; ++earlier) {
        first_use = block.local_expert[earlier] != expert;
      }
      if (first_use) {
        const std::int32_t tile = group_tile[expert] + in_group / kTileRows;
        atomic_add(&schedule.minibatches[minibatch_of_tile(geometry, macrobatch, tile)].pull_begin, 1);
      }
    }
    Lanes::sync();
  }
}

/// Phase 5, for every (macrobatch, expert): its entries of the tile table.
template <typename Lanes>
MOEWAVE_HD void fill_tiles(const ScheduleTask& task, std::int32_t m, std::int32_t expert) {
  const std::int64_t at = std::int64_t{m} * task.experts() + expert;
  const std::int32_t rows = task.scratch.group_rows[at];
  const std::int32_t tiles = static_cast<std::int32_t>(ceil_div(rows, kTileRows));
  for (std::int32_t i = Lanes::id(); i < tiles; i += Lanes::width()) {
    const std::int32_t tile = task.scratch.group_tile[at] + i;
    const std::int32_t valid = static_cast<std::int32_t>(min64(kTileRows, rows - std::int64_t{i} * kTileRows));
    task.schedule.tiles[tile] = {expert, valid, m,
                                 minibatch_of_tile(task.geometry, task.schedule.macrobatches[m], tile)};
  }
}

/// Phase 6. Counts of pulls and wgrad groups become the begins of the minibatches.
template <typename Lanes>
MOEWAVE_HD void finish_schedule(const ScheduleTask& task) {
  Minibatch* minibatches = task.schedule.minibatches;
  const std::int32_t count = task.schedule.totals->minibatches;
  std::int64_t pulls = 0;
  std::int64_t groups = 0;
  for (std::int32_t base = 0; base <= count; base += Lanes::width()) {
    const std::int32_t q = base + Lanes::id();
    std::int64_t all_pulls = 0;
    std::int64_t all_groups = 0;
    const std::int64_t pull = pulls + Lanes::exclusive_sum(q <= count ? minibatches[q].pull_begin : 0, all_pulls);
    const std::int64_t group = groups + Lanes::exclusive_sum(q <= count ? minibatches[q].group_begin : 0, all_groups);
    if (q <= count) {
      minibatches[q].pull_begin = static_cast<std::int32_t>(pull);
      minibatches[q].group_begin = static_cast<std::int32_t>(group);
    }
    pulls += all_pulls;
    groups += all_groups;
  }
}

/// All six phases, for worker `worker` of `workers`. `barrier()` is the rank's barrier and says
/// whether to go on: false ends the call with the tables unfinished, on all workers alike. `ids_of(rank)` gives a
/// rank's ids. totals->bad_route must be kNoBadRoute before any worker begins.
template <typename Lanes, typename IdsOf, typename Barrier>
MOEWAVE_HD bool build_schedule(const ScheduleTask& task, int worker, int workers, PlaceScratch& places, IdsOf&& ids_of,
                               Barrier&& barrier) {
  const std::int32_t blocks = task.blocks();
  for (std::int32_t block = worker; block < blocks; block += workers) {
    const SourceBlock source = source_block(task.tokens_per_rank, block);
    count_block<Lanes>(task, source, ids_of(source.rank));
  }
  if (!barrier()) return false;
  if (worker == 0) cut_macrobatches<Lanes>(task);
  if (!barrier()) return false;
  const std::int32_t macrobatches = task.schedule.totals->macrobatches;
  const std::int32_t columns = columns_of_macrobatch<Lanes>(task);
  for (std::int32_t i = worker; i < macrobatches * columns; i += workers) {
    offsets_of_experts<Lanes>(task, i / columns, i % columns);
  }
  if (!barrier()) return false;
  if (worker == 0) assign_groups<Lanes>(task);
  if (!barrier()) return false;
  for (std::int32_t block = worker; block < blocks; block += workers) {
    place_block<Lanes>(task, source_block(task.tokens_per_rank, block), places);
  }
  for (std::int32_t i = worker; i < macrobatches * task.experts(); i += workers) {
    fill_tiles<Lanes>(task, i / task.experts(), i % task.experts());
  }
  if (!barrier()) return false;
  if (worker == 0) finish_schedule<Lanes>(task);
  return barrier();
}

}  // namespace moewave::protocol
