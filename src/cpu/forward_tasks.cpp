// Forward tasks: gate-up with SwiGLU, and down with the push of each row into its owner's combine slot.
#include "cpu/task_inputs.h"
#include "math/swiglu.h"

namespace moewave::cpu {
namespace {

using protocol::kTileRows;
using protocol::Task;
using protocol::TaskKind;

// The product holds g and u of one row; writes h and, where wanted, the rounded g and u.
void swiglu_row(const float* sums, ColumnBlock block, float clamp, Bf16* hidden, const PreActivations* keep) {
  for (int i = 0; i < block.count; ++i) {
    const Bf16 gate = math::round_gate(sums[i], clamp);
    const Bf16 up = math::round_linear(sums[block.count + i], clamp);
    hidden[block.begin + i] = math::swiglu(gate, up, clamp);
    if (keep != nullptr) {
      keep->gate[block.begin + i] = gate;
      keep->up[block.begin + i] = up;
    }
  }
}

// Row of h in its ring: minibatch q lies in slot q % kHiddenSlots.
Bf16* hidden_row(const Sm& sm, std::int32_t minibatch, std::int64_t row) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const std::int64_t first_row = std::int64_t{sm.schedule.minibatches[minibatch].tile_begin} * kTileRows;
  const std::int64_t place = (minibatch % protocol::kHiddenSlots) * geometry.minibatch_rows() + row - first_row;
  return sm.own_workspace(sm.layout.workspace.hidden_ring) + place * geometry.intermediate;
}

// Waits until the down tasks of all minibatches up to `minibatch` - kHiddenSlots are done. Of all: that one may be
// empty, and then nobody waited for the minibatch that used the slot before it.
void wait_for_hidden_slot(Sm& sm, std::int32_t minibatch) {
  for (; sm.hidden_watermark <= minibatch - protocol::kHiddenSlots; ++sm.hidden_watermark) {
    const std::int32_t before = sm.hidden_watermark;
    const std::int64_t tiles =
        sm.schedule.minibatches[before + 1].tile_begin - sm.schedule.minibatches[before].tile_begin;
    sm.wait_counter(sm.layout.counters.minibatch_done + before, tiles * sm.layout.geometry.down_blocks(), "h ring",
                    before);
  }
}

// Waits for: tokens of the minibatch; its slot of h. Produces: h. Consumer: down.
void gate_up(Sm& sm, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const protocol::Schedule& schedule = sm.schedule;
  wait_for_tokens(sm, task.minibatch);
  wait_for_hidden_slot(sm, task.minibatch);
  const std::int64_t begin = sm.now_ns();
  const protocol::Tile& tile = schedule.tiles[task.tile];
  const std::int64_t first_row = std::int64_t{task.tile} * kTileRows;
  RowPointers x_rows;
  gather_rows(sm, first_row, tile.rows, sm.layout.shared.x, sm.layout.workspace.ring_x, x_rows.data());

  const std::int64_t width = geometry.intermediate;
  const Bf16* gate = sm.call->gate_up + std::int64_t{tile.expert} * 2 * width * geometry.hidden;
  const ColumnBlock block = column_block(task.column, protocol::kGateUpColumns, width);
  multiply_gate_up(sm, x_rows, tile.rows, gate, gate + width * geometry.hidden, block);
  for (int i = 0; i < tile.rows; ++i) {
    const std::int64_t row = first_row + i;
    const PreActivations keep = sm.call->saves && row < geometry.saved_rows ? saved_row(sm, row) : PreActivations{};
    swiglu_row(sm.product.row(i), block, clamp_bound(sm.shape.clamp), hidden_row(sm, task.minibatch, row),
               keep.gate != nullptr ? &keep : nullptr);
  }
  sm.add(sm.layout.counters.hidden_done + task.tile);
  sm.add(sm.layout.counters.token_reads + tile.macrobatch);
  sm.record("gate-up", begin, task.tile, task.minibatch);
}

// Waits for: all column blocks of h of the tile. Produces: 512 B a row in the owner's slot. Consumer: the owner's
// merge, after the exit flags.
void down(Sm& sm, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  sm.wait_counter(sm.layout.counters.hidden_done + task.tile, geometry.gate_up_blocks(), "h of tile", task.tile);
  const std::int64_t begin = sm.now_ns();
  const protocol::Tile& tile = sm.schedule.tiles[task.tile];
  const std::int64_t first_row = std::int64_t{task.tile} * kTileRows;
  RowPointers h_rows;
  for (int i = 0; i < tile.rows; ++i) {
    h_rows[static_cast<std::size_t>(i)] = hidden_row(sm, task.minibatch, first_row + i);
  }
  const Bf16* weights = sm.call->down + std::int64_t{tile.expert} * geometry.hidden * geometry.intermediate;
  const ColumnBlock block = column_block(task.column, protocol::kDownColumns, geometry.hidden);
  RowPointers weight_rows;
  matrix_rows(weights, geometry.intermediate, block.begin, block.count, weight_rows.data());
  sm.product.begin(tile.rows, block.count);
  sm.product.add_rows_by_rows(h_rows.data(), weight_rows.data(), geometry.intermediate);
  for (int i = 0; i < tile.rows; ++i) {
    const protocol::RouteRef route = sm.schedule.row_route[first_row + i];
    Bf16* slot = sm.shared_of(route.rank, sm.layout.shared.slots) + route.route * geometry.hidden + block.begin;
    std::transform(sm.product.row(i), sm.product.row(i) + block.count, slot, to_bf16);
  }
  sm.add(sm.layout.counters.minibatch_done + task.minibatch);
  sm.record("down", begin, task.tile, task.minibatch);
}

void shared_gate_up(Sm& sm, const Task& task) {
  wait_for_own_x(sm);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t width = sm.shape.shared_intermediate;
  const std::int64_t first = std::int64_t{task.tile} * kTileRows;
  const int rows = own_tile_rows(sm, task.tile);
  RowPointers x_rows;
  matrix_rows(sm.own_shared(sm.layout.shared.x), sm.shape.hidden, first, rows, x_rows.data());
  const ColumnBlock block = column_block(task.column, protocol::kGateUpColumns, width);
  multiply_gate_up(sm, x_rows, rows, sm.call->shared_gate, sm.call->shared_up, block);
  for (int i = 0; i < rows; ++i) {
    const bool keeps = sm.call->saves && sm.layout.geometry.saved_rows > 0;
    const PreActivations keep = keeps ? shared_row(sm, first + i) : PreActivations{};
    Bf16* hidden = sm.own_workspace(sm.layout.workspace.shared_hidden) + (first + i) * width;
    swiglu_row(sm.product.row(i), block, clamp_bound(sm.shape.shared_clamp), hidden, keeps ? &keep : nullptr);
  }
  sm.add(sm.layout.counters.shared_hidden + task.tile);
  sm.record("shared gate-up", begin, task.tile);
}

void shared_down(Sm& sm, const Task& task) {
  const std::int64_t width = sm.shape.shared_intermediate;
  sm.wait_counter(sm.layout.counters.shared_hidden + task.tile,
                  protocol::Geometry::blocks(width, protocol::kGateUpColumns), "shared h of tile", task.tile);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first = std::int64_t{task.tile} * kTileRows;
  const int rows = own_tile_rows(sm, task.tile);
  RowPointers h_rows;
  matrix_rows(sm.own_workspace(sm.layout.workspace.shared_hidden), width, first, rows, h_rows.data());
  const ColumnBlock block = column_block(task.column, protocol::kDownColumns, sm.shape.hidden);
  RowPointers weight_rows;
  matrix_rows(sm.call->shared_down, width, block.begin, block.count, weight_rows.data());
  sm.product.begin(rows, block.count);
  sm.product.add_rows_by_rows(h_rows.data(), weight_rows.data(), width);
  for (int i = 0; i < rows; ++i) {
    Bf16* y = sm.own_workspace(sm.layout.workspace.shared_y) + (first + i) * sm.shape.hidden + block.begin;
    std::transform(sm.product.row(i), sm.product.row(i) + block.count, y, to_bf16);
  }
  sm.record("shared down", begin, task.tile);
}

}  // namespace

void run_forward_task(Sm& sm, const protocol::TaskOrder& /*order*/, const Task& task) {
  switch (task.kind) {
    case TaskKind::kSharedGateUp:
      return shared_gate_up(sm, task);
    case TaskKind::kSharedDown:
      return shared_down(sm, task);
    case TaskKind::kGateUp:
      return gate_up(sm, task);
    case TaskKind::kDown:
      return down(sm, task);
    default:
      throw Error("a forward task order holds a backward task");
  }
}

}  // namespace moewave::cpu
