// The order of tasks, forward and backward. A rank's computing SMs take task numbers in this order (by a ticket); what
// a number means follows from the minibatch table by arithmetic, so no task list is stored.
//
// Steps. Forward step s holds gate-up of minibatch s and down of minibatch s - 1. Backward step s holds the
// recomputation of minibatch s (of rows whose pre-activations were not saved), dh of minibatch s - 1, and of minibatch
// s - 2 dx and the weight gradients of the experts that end in it. Within a step the kinds are interleaved in
// proportion (forward: in runs of interleave_tasks), so that the link carries combine traffic at an even rate. Tasks of
// the shared expert, which need no schedule, come first.
//
// Progress. Every task waits only for pulls and for tasks with lower numbers, so the oldest unfinished task can always
// run:
//   down(q) needs gate-up(q), one step earlier; gate-up(q) reuses h of minibatch q - kHiddenSlots, whose down is two
//   steps earlier. dh(q) needs recompute(q), one step earlier; dx(q) and wgrad need dh, one step earlier. With two
//   segments a macrobatch has at least two minibatches (empty ones if need be), so the first minibatch of macrobatch m
//   + 2 is at least three after the last of m, and recompute or pulls for it wait only for tasks in earlier steps.
//
// Reuse. Gate-up(q) takes over a slot of h when the down tasks of *all* minibatches up to q - kHiddenSlots are done,
// and a pull for macrobatch m a place of a segment when the token readers of *all* macrobatches up to m - segments are.
// The latest of them alone would not do: a minibatch without tiles, or a macrobatch without remote tokens, waits for
// nothing itself, so that its end says nothing of those before it. Gradient and recomputed rows need only macrobatch m
// - segments: every macrobatch that has a successor has rows, and each of its readers waited for its own predecessor.
#pragma once

#include <cstdint>

#include "protocol/division.h"
#include "protocol/schedule.h"

namespace moewave::protocol {

enum class TaskKind : std::uint8_t {
  kSharedGateUp,
  kSharedDown,
  kGateUp,
  kDown,
  kSharedRecompute,
  kSharedDh,
  kSharedDx,
  kSharedWgrad,
  kRecompute,
  kDh,
  kDx,
  kWgrad,
};

struct Task {
  TaskKind kind;
  std::int32_t minibatch;  // -1: shared expert
  std::int32_t tile;       // of the row table; of the rank's own tokens for the shared expert; wgrad: unused
  std::int32_t column;     // column block; wgrad: block of the weight matrices
  std::int32_t group;      // wgrad
};

/// Place in a minibatch's (or the shared expert's) tiles x columns, by groups of at most `most` tiles and of one size:
/// within a group all tiles of one column block follow one another, so that they find its weights in the L2.
struct RasterPlace {
  std::int32_t tile;
  std::int32_t column;
};

MOEWAVE_HD constexpr std::int32_t raster_group(std::int32_t tiles, std::int32_t most) {
  const std::int32_t groups = (tiles + most - 1) / most;
  return groups <= 1 ? most : (tiles + groups - 1) / groups;
}

MOEWAVE_HD inline RasterPlace raster(std::int32_t index, std::int32_t tiles, std::int32_t columns, std::int32_t most) {
  const std::int32_t size = raster_group(tiles, most);
  const std::int32_t group = index / (size * columns);
  const std::int32_t first_tile = group * size;
  const std::int32_t group_tiles = static_cast<std::int32_t>(min64(size, tiles - first_tile));
  const std::int32_t in_group = index - first_tile * columns;
  return {first_tile + in_group % group_tiles, in_group / group_tiles};
}

/// Which of two kinds item `index` is, and its number there.
struct Interleaved {
  bool is_first;
  std::int64_t index;
};

/// Spreads `first` items evenly among `first + second`, in runs of `run` items of a kind and beginning with one, so
/// that what the second kind needs of the step before has had a run's time to end. What does not fill a run comes at
/// the end, the first kind before the second. Runs as long as the rank has SMs let those that start together share
/// weights and tokens in the L2; shorter runs load the link more evenly.
MOEWAVE_HD inline Interleaved interleave(std::int64_t index, std::int64_t first, std::int64_t second,
                                         std::int64_t run = 1) {
  const std::int64_t first_runs = quotient(first, run);
  const std::int64_t all_runs = first_runs + quotient(second, run);
  if (index >= all_runs * run) {
    const std::int64_t rest = index - all_runs * run;
    const std::int64_t firsts = first - first_runs * run;
    if (rest < firsts) return {true, first_runs * run + rest};
    return {false, index - first};
  }
  const std::int64_t place = quotient(index, run);
  const std::int64_t in_run = index - place * run;
  const std::int64_t firsts_before = quotient(place * first_runs + all_runs - 1, all_runs);
  if (quotient((place + 1) * first_runs + all_runs - 1, all_runs) > firsts_before)
    return {true, firsts_before * run + in_run};
  return {false, (place - firsts_before) * run + in_run};
}

/// The tasks of one direction. Built from a finished schedule, or from geometry and tokens alone when the rank has no
/// rows.
class TaskOrder {
 public:
  MOEWAVE_HD TaskOrder(const Geometry& geometry, const Schedule& schedule, std::int32_t own_tokens, bool backward)
      : geometry_(geometry), schedule_(schedule), backward_(backward) {
    const std::int32_t tiles = Geometry::blocks(own_tokens, kTileRows);
    const bool shared = geometry.shared_intermediate > 0;
    shared_tiles_ = shared ? tiles : 0;
    shared_wgrad_ = shared ? 3 * geometry.wgrad_blocks_of_matrix(geometry.shared_intermediate) : 0;
    saved_tiles_ = static_cast<std::int32_t>(geometry.saved_rows / kTileRows);
  }

  MOEWAVE_HD std::int64_t size() const { return shared_tasks() + tasks_before_step(steps()); }

  MOEWAVE_HD Task task(std::int64_t number) const {
    if (number < shared_tasks()) return shared_task(number);
    number -= shared_tasks();
    const std::int32_t step = step_of(number);
    const std::int64_t index = number - tasks_before_step(step);
    return backward_ ? backward_task(step, index) : forward_task(step, index);
  }

  /// Tasks that must be done before the segments of macrobatch m may be used again.
  MOEWAVE_HD std::int64_t token_readers(std::int32_t m) const {
    const std::int64_t tiles = tiles_of(m);
    if (!backward_) return tiles * geometry_.gate_up_blocks();
    return recomputed_tiles_of(m) * geometry_.gate_up_blocks() + tiles * geometry_.dh_blocks() +
           groups_of(m) * geometry_.wgrad_blocks();
  }
  MOEWAVE_HD std::int64_t gradient_row_readers(std::int32_t m) const {
    return tiles_of(m) * geometry_.dx_blocks() + groups_of(m) * geometry_.wgrad_blocks();
  }
  MOEWAVE_HD std::int64_t recomputed_row_readers(std::int32_t m) const { return tiles_of(m) * geometry_.dh_blocks(); }

  MOEWAVE_HD bool is_recomputed(std::int32_t tile) const { return tile >= saved_tiles_; }

 private:
  MOEWAVE_HD std::int32_t steps() const { return schedule_.totals->minibatches + (backward_ ? 2 : 1); }

  MOEWAVE_HD std::int64_t tiles_before(std::int32_t minibatch) const {
    return schedule_.minibatches[clamp(minibatch)].tile_begin;
  }
  MOEWAVE_HD std::int64_t recomputed_before(std::int32_t minibatch) const {
    return max64(0, tiles_before(minibatch) - saved_tiles_);
  }
  MOEWAVE_HD std::int64_t groups_before(std::int32_t minibatch) const {
    return schedule_.minibatches[clamp(minibatch)].group_begin;
  }
  MOEWAVE_HD std::int32_t clamp(std::int32_t minibatch) const {
    return static_cast<std::int32_t>(max64(0, min64(minibatch, schedule_.totals->minibatches)));
  }

  MOEWAVE_HD std::int64_t tasks_before_step(std::int32_t step) const {
    if (!backward_) {
      return tiles_before(step) * geometry_.gate_up_blocks() + tiles_before(step - 1) * geometry_.down_blocks();
    }
    return recomputed_before(step) * geometry_.gate_up_blocks() + tiles_before(step - 1) * geometry_.dh_blocks() +
           tiles_before(step - 2) * geometry_.dx_blocks() + groups_before(step - 2) * geometry_.wgrad_blocks();
  }

  MOEWAVE_HD std::int32_t step_of(std::int64_t number) const {
    std::int32_t low = 0;
    std::int32_t high = steps() - 1;
    while (low < high) {
      const std::int32_t middle = (low + high + 1) / 2;
      if (tasks_before_step(middle) <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  MOEWAVE_HD Task row_task(TaskKind kind, std::int32_t minibatch, std::int32_t first_tile, std::int64_t index,
                           std::int64_t tiles, std::int32_t columns) const {
    const RasterPlace place =
        raster(static_cast<std::int32_t>(index), static_cast<std::int32_t>(tiles), columns, geometry_.raster_tiles);
    return {kind, minibatch, first_tile + place.tile, place.column, -1};
  }

  MOEWAVE_HD std::int64_t tiles_in(std::int32_t minibatch) const {
    return tiles_before(minibatch + 1) - tiles_before(minibatch);
  }

  MOEWAVE_HD Task minibatch_task(TaskKind kind, std::int32_t minibatch, std::int64_t index,
                                 std::int32_t columns) const {
    return row_task(kind, minibatch, static_cast<std::int32_t>(tiles_before(minibatch)), index, tiles_in(minibatch),
                    columns);
  }

  MOEWAVE_HD Task forward_task(std::int32_t step, std::int64_t index) const {
    const std::int64_t gate_up = tiles_in(step) * geometry_.gate_up_blocks();
    const std::int64_t down = tiles_in(step - 1) * geometry_.down_blocks();
    const Interleaved pick = interleave(index, gate_up, down, geometry_.interleave_tasks);
    if (pick.is_first) return minibatch_task(TaskKind::kGateUp, step, pick.index, geometry_.gate_up_blocks());
    return minibatch_task(TaskKind::kDown, step - 1, pick.index, geometry_.down_blocks());
  }

  MOEWAVE_HD Task backward_task(std::int32_t step, std::int64_t index) const {
    const std::int64_t recompute_tiles = recomputed_before(step + 1) - recomputed_before(step);
    const std::int64_t recompute = recompute_tiles * geometry_.gate_up_blocks();
    const std::int64_t dh = tiles_in(step - 1) * geometry_.dh_blocks();
    const std::int64_t dx = tiles_in(step - 2) * geometry_.dx_blocks();
    const std::int64_t wgrad = (groups_before(step - 1) - groups_before(step - 2)) * geometry_.wgrad_blocks();
    Interleaved pick = interleave(index, recompute, dh + dx + wgrad);
    if (pick.is_first) {
      const std::int64_t first_tile = tiles_before(step + 1) - recompute_tiles;
      return row_task(TaskKind::kRecompute, step, static_cast<std::int32_t>(first_tile), pick.index, recompute_tiles,
                      geometry_.gate_up_blocks());
    }
    pick = interleave(pick.index, dh, dx + wgrad);
    if (pick.is_first) return minibatch_task(TaskKind::kDh, step - 1, pick.index, geometry_.dh_blocks());
    pick = interleave(pick.index, dx, wgrad);
    if (pick.is_first) return minibatch_task(TaskKind::kDx, step - 2, pick.index, geometry_.dx_blocks());
    const std::int64_t blocks = geometry_.wgrad_blocks();
    return {TaskKind::kWgrad, step - 2, -1, static_cast<std::int32_t>(remainder(pick.index, blocks)),
            static_cast<std::int32_t>(groups_before(step - 2) + quotient(pick.index, blocks))};
  }

  // The shared expert's tasks, kind after kind.
  MOEWAVE_HD std::int64_t shared_tasks() const {
    if (geometry_.shared_intermediate == 0) return 0;
    if (!backward_) return shared_tiles_ * (shared_gate_up_blocks() + geometry_.down_blocks());
    return shared_tiles_ * (shared_recompute_blocks() + shared_dh_blocks() + geometry_.dx_blocks()) + shared_wgrad_;
  }
  MOEWAVE_HD std::int64_t shared_gate_up_blocks() const {
    return Geometry::blocks(geometry_.shared_intermediate, kGateUpColumns);
  }
  MOEWAVE_HD std::int64_t shared_dh_blocks() const {
    return Geometry::blocks(geometry_.shared_intermediate, kDhColumns);
  }
  // A context that saves nothing of the routed experts saves nothing of the shared one.
  MOEWAVE_HD std::int64_t shared_recompute_blocks() const {
    return geometry_.saved_rows == 0 ? shared_gate_up_blocks() : 0;
  }

  MOEWAVE_HD Task shared_task(std::int64_t number) const {
    const TaskKind forward[] = {TaskKind::kSharedGateUp, TaskKind::kSharedDown};
    const std::int64_t forward_blocks[] = {shared_gate_up_blocks(), geometry_.down_blocks()};
    const TaskKind backward[] = {TaskKind::kSharedRecompute, TaskKind::kSharedDh, TaskKind::kSharedDx};
    const std::int64_t backward_blocks[] = {shared_recompute_blocks(), shared_dh_blocks(), geometry_.dx_blocks()};
    const int kinds = backward_ ? 3 : 2;
    for (int i = 0; i < kinds; ++i) {
      const std::int64_t blocks = backward_ ? backward_blocks[i] : forward_blocks[i];
      if (number < shared_tiles_ * blocks) {
        return row_task(backward_ ? backward[i] : forward[i], -1, 0, number, shared_tiles_,
                        static_cast<std::int32_t>(blocks));
      }
      number -= shared_tiles_ * blocks;
    }
    return {TaskKind::kSharedWgrad, -1, -1, static_cast<std::int32_t>(number), -1};
  }

  MOEWAVE_HD std::int64_t tiles_of(std::int32_t m) const {
    return schedule_.macrobatches[m + 1].tile_begin - schedule_.macrobatches[m].tile_begin;
  }
  MOEWAVE_HD std::int64_t recomputed_tiles_of(std::int32_t m) const {
    return max64(0,
                 schedule_.macrobatches[m + 1].tile_begin - max64(saved_tiles_, schedule_.macrobatches[m].tile_begin));
  }
  MOEWAVE_HD std::int64_t groups_of(std::int32_t m) const {
    return groups_before(schedule_.macrobatches[m + 1].minibatch_begin) -
           groups_before(schedule_.macrobatches[m].minibatch_begin);
  }

  Geometry geometry_;
  Schedule schedule_;
  bool backward_;
  std::int32_t shared_tiles_;
  std::int32_t saved_tiles_;
  std::int64_t shared_wgrad_;
};

/// Which part of which weight gradient a wgrad block is: rows along I, columns along H (down: rows along I too, so that
/// all three matrices cut alike).
struct WgradBlock {
  int matrix;  // 0 gate, 1 up, 2 down
  std::int64_t intermediate_begin;
  std::int64_t hidden_begin;
};

MOEWAVE_HD inline WgradBlock wgrad_block(std::int64_t hidden, std::int64_t intermediate, std::int32_t number) {
  const std::int32_t across = Geometry::blocks(hidden, kWgradHidden);
  const std::int32_t of_matrix = across * Geometry::blocks(intermediate, kWgradIntermediate);
  const std::int32_t in_matrix = number % of_matrix;
  return {number / of_matrix, std::int64_t{in_matrix / across} * kWgradIntermediate,
          std::int64_t{in_matrix % across} * kWgradHidden};
}

}  // namespace moewave::protocol
