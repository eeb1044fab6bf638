// Backward tasks: recomputation of g and u, dh with SwiGLU backward and router gradient, dx with its push, weight
// gradients.
#include <vector>

#include "cpu/task_inputs.h"
#include "math/swiglu.h"

namespace moewave::cpu {
namespace {

using protocol::kTileRows;
using protocol::Task;
using protocol::TaskKind;
using protocol::TaskOrder;
using protocol::Tile;

// Buffers of a macrobatch's segment are free when the readers of macrobatch m - segments are done.
void wait_for_segment(Sm& sm, std::int32_t macrobatch, std::int64_t first_counter, const char* what,
                      std::int64_t (TaskOrder::*readers)(std::int32_t) const, const TaskOrder& order) {
  const std::int32_t before = macrobatch - sm.layout.geometry.segments;
  if (before >= 0) sm.wait_counter(first_counter + before, (order.*readers)(before), what, before);
}

// Waits for: tokens; the segment of recomputed rows. Produces: g and u as forward rounded them. Consumer: dh.
void recompute(Sm& sm, const TaskOrder& order, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const Tile& tile = sm.schedule.tiles[task.tile];
  wait_for_tokens(sm, task.minibatch);
  wait_for_segment(sm, tile.macrobatch, sm.layout.counters.recompute_reads, "recomputed rows",
                   &TaskOrder::recomputed_row_readers, order);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first_row = std::int64_t{task.tile} * kTileRows;
  RowPointers x_rows;
  gather_rows(sm, first_row, tile.rows, sm.layout.shared.x, sm.layout.workspace.ring_x, x_rows.data());
  const std::int64_t width = geometry.intermediate;
  const Bf16* gate = sm.call->gate_up + std::int64_t{tile.expert} * 2 * width * geometry.hidden;
  const ColumnBlock block = column_block(task.column, protocol::kGateUpColumns, width);
  multiply_gate_up(sm, x_rows, tile.rows, gate, gate + width * geometry.hidden, block);
  const float clamp = clamp_bound(sm.shape.clamp);
  for (int i = 0; i < tile.rows; ++i) {
    const PreActivations kept = recomputed_row(sm, tile.macrobatch, first_row + i);
    for (int c = 0; c < block.count; ++c) {
      kept.gate[block.begin + c] = math::round_gate(sm.product.row(i)[c], clamp);
      kept.up[block.begin + c] = math::round_linear(sm.product.row(i)[block.count + c], clamp);
    }
  }
  sm.add(sm.layout.counters.recomputed + task.tile);
  sm.add(sm.layout.counters.token_reads + tile.macrobatch);
  sm.record("recompute", begin, task.tile, task.minibatch);
}

// What the epilogue of dh makes of one row: dG and dU (of width `width`, side by side), w * h, and <dh, h> of the
// block.
struct GradientRow {
  Bf16* gate;
  Bf16* up;
  Bf16* weighted_hidden;
};

float swiglu_backward_row(const float* dh, ColumnBlock block, float weight, float clamp, const PreActivations& kept,
                          const GradientRow& gradient) {
  float dot = 0.0f;
  for (int c = 0; c < block.count; ++c) {
    const std::int64_t at = block.begin + c;
    const float h = to_float(math::swiglu(kept.gate[at], kept.up[at], clamp));
    const math::SwigluGradient d = math::swiglu_backward(kept.gate[at], kept.up[at], weight * dh[c], clamp);
    dot += dh[c] * h;
    gradient.gate[at] = to_bf16(d.gate);
    gradient.up[at] = to_bf16(d.up);
    gradient.weighted_hidden[at] = to_bf16(weight * h);
  }
  return dot;
}

GradientRow gradient_row(const Sm& sm, std::int64_t row) {
  const std::int64_t width = sm.shape.intermediate;
  Bf16* gate = sm.own_workspace(sm.layout.workspace.dgate_up) + row * 2 * width;
  return {gate, gate + width, sm.own_workspace(sm.layout.workspace.weighted_hidden) + row * width};
}

// Waits for: tokens (x and dout); g and u; the segment of gradient rows. Produces: dG, dU, w * h, and one FP32 a row in
// the owner's router partials. Consumers: dx, wgrad; the owner's merge.
void dh(Sm& sm, const TaskOrder& order, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const Tile& tile = sm.schedule.tiles[task.tile];
  const bool recomputed = order.is_recomputed(task.tile);
  wait_for_tokens(sm, task.minibatch);
  if (recomputed) {
    sm.wait_counter(sm.layout.counters.recomputed + task.tile, geometry.gate_up_blocks(), "recomputed tile", task.tile);
  }
  wait_for_segment(sm, tile.macrobatch, sm.layout.counters.row_reads, "gradient rows", &TaskOrder::gradient_row_readers,
                   order);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first_row = std::int64_t{task.tile} * kTileRows;
  RowPointers dout_rows;
  gather_rows(sm, first_row, tile.rows, sm.layout.shared.dout, sm.layout.workspace.ring_dout, dout_rows.data());
  const std::int64_t width = geometry.intermediate;
  const ColumnBlock block = column_block(task.column, protocol::kDhColumns, width);
  const Bf16* weights = sm.call->down + std::int64_t{tile.expert} * geometry.hidden * width;
  sm.product.begin(tile.rows, block.count);
  sm.product.add_rows_by_matrix(dout_rows.data(), weights + block.begin, width, geometry.hidden);

  for (int i = 0; i < tile.rows; ++i) {
    const std::int64_t row = first_row + i;
    const protocol::RouteRef route = sm.schedule.row_route[row];
    const float weight = sm.shared_of(route.rank, sm.layout.shared.weights)[route.route];
    const PreActivations kept = recomputed ? recomputed_row(sm, tile.macrobatch, row) : saved_row(sm, row);
    const float dot = swiglu_backward_row(sm.product.row(i), block, weight, clamp_bound(sm.shape.clamp), kept,
                                          gradient_row(sm, segment_row(sm, tile.macrobatch, row)));
    sm.shared_of(route.rank,
                 sm.layout.shared.router_partials)[std::int64_t{route.route} * geometry.dh_blocks() + task.column] =
        dot;
  }
  sm.add(sm.layout.counters.hidden_done + task.tile);
  sm.add(sm.layout.counters.token_reads + tile.macrobatch);
  sm.add(sm.layout.counters.recompute_reads + tile.macrobatch);
  sm.record("dh", begin, task.tile, task.minibatch);
}

// Waits for: all column blocks of dh of the tile. Produces: rows of dX in the owner's slots. Consumer: the owner's
// merge.
void dx(Sm& sm, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const Tile& tile = sm.schedule.tiles[task.tile];
  sm.wait_counter(sm.layout.counters.hidden_done + task.tile, geometry.dh_blocks(), "dh of tile", task.tile);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first_row = std::int64_t{task.tile} * kTileRows;
  const std::int64_t width = 2 * geometry.intermediate;
  RowPointers gradient_rows;
  for (int i = 0; i < tile.rows; ++i) {
    gradient_rows[static_cast<std::size_t>(i)] = gradient_row(sm, segment_row(sm, tile.macrobatch, first_row + i)).gate;
  }
  const ColumnBlock block = column_block(task.column, protocol::kDxColumns, geometry.hidden);
  const Bf16* weights = sm.call->gate_up + std::int64_t{tile.expert} * width * geometry.hidden;
  sm.product.begin(tile.rows, block.count);
  sm.product.add_rows_by_matrix(gradient_rows.data(), weights + block.begin, geometry.hidden, width);
  for (int i = 0; i < tile.rows; ++i) {
    const protocol::RouteRef route = sm.schedule.row_route[first_row + i];
    Bf16* slot = sm.shared_of(route.rank, sm.layout.shared.slots) + route.route * geometry.hidden + block.begin;
    std::transform(sm.product.row(i), sm.product.row(i) + block.count, slot, to_bf16);
  }
  sm.add(sm.layout.counters.row_reads + tile.macrobatch);
  sm.record("dx", begin, task.tile, task.minibatch);
}

// ---- weight gradients

// One block of one matrix: rows of the product and columns, and where they lie in the matrix.
struct WgradView {
  protocol::WgradBlock block;
  ColumnBlock intermediate;
  ColumnBlock hidden;
  bool is_down;
  int rows() const { return is_down ? hidden.count : intermediate.count; }
  int columns() const { return is_down ? intermediate.count : hidden.count; }
  // Offset of the product's row m, column 0 in the matrix ([I, H], or [H, I] for down).
  std::int64_t offset(int m, std::int64_t hidden_size, std::int64_t intermediate_size) const {
    return is_down ? (hidden.begin + m) * intermediate_size + intermediate.begin
                   : (intermediate.begin + m) * hidden_size + hidden.begin;
  }
};

WgradView wgrad_view(std::int64_t hidden, std::int64_t intermediate, std::int32_t number) {
  WgradView view;
  view.block = protocol::wgrad_block(hidden, intermediate, number);
  view.intermediate = {view.block.intermediate_begin,
                       static_cast<int>(std::min<std::int64_t>(protocol::kWgradIntermediate,
                                                               intermediate - view.block.intermediate_begin))};
  view.hidden = {view.block.hidden_begin,
                 static_cast<int>(std::min<std::int64_t>(protocol::kWgradHidden, hidden - view.block.hidden_begin))};
  view.is_down = view.block.matrix == 2;
  return view;
}

// Gate and up: (dG or dU)^T x. Down: dout^T (w h). `left` and `right` are the rows' starts of the two operands.
void add_rows_to_product(Sm& sm, const WgradView& view, std::vector<const Bf16*>& gradients,
                         std::vector<const Bf16*>& tokens) {
  for (const Bf16*& row : gradients) row += view.intermediate.begin;
  for (const Bf16*& row : tokens) row += view.hidden.begin;
  const std::int64_t depth = static_cast<std::int64_t>(tokens.size());
  if (view.is_down) {
    sm.product.add_columns_by_columns(tokens.data(), gradients.data(), depth);
  } else {
    sm.product.add_columns_by_columns(gradients.data(), tokens.data(), depth);
  }
}

// Adds once into what the buffer holds, or writes; one rounding for BF16.
void deliver_row(const float* sums, int count, bool accumulate, float* f32, Bf16* bf16) {
  for (int n = 0; n < count; ++n) {
    if (f32 != nullptr) {
      f32[n] = accumulate ? f32[n] + sums[n] : sums[n];
    } else {
      bf16[n] = to_bf16(accumulate ? to_float(bf16[n]) + sums[n] : sums[n]);
    }
  }
}

// Offset of (expert, matrix) in gate_up [E_local, 2I, H] or down [E_local, H, I].
std::int64_t matrix_offset(const Sm& sm, std::int32_t expert, int matrix) {
  const std::int64_t size = sm.shape.hidden * sm.shape.intermediate;
  return matrix == 2 ? expert * size : (std::int64_t{expert} * 2 + matrix) * size;
}

// Waits for: dh of all tiles of the group; the sums that the expert's previous group carried. Produces: carried sums,
// or after the expert's last group the gradient. Consumer: the next group's task, or the caller.
void wgrad(Sm& sm, const TaskOrder& order, const Task& task) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const protocol::WgradGroup& group = sm.schedule.groups[task.group];
  for (std::int32_t tile = group.tile_begin; tile < group.tile_end; ++tile) {
    sm.wait_counter(sm.layout.counters.hidden_done + tile, geometry.dh_blocks(), "dh of tile", tile);
  }
  if (group.previous >= 0) {
    sm.wait_counter(sm.layout.counters.row_reads + group.previous, order.gradient_row_readers(group.previous),
                    "carried sums", group.previous);
  }
  const std::int64_t begin = sm.now_ns();
  const WgradView view = wgrad_view(geometry.hidden, geometry.intermediate, task.column);
  const std::int64_t matrix = matrix_offset(sm, group.expert, view.block.matrix);
  float* carried =
      sm.own_workspace(view.is_down ? sm.layout.workspace.carried_down : sm.layout.workspace.carried_gate_up);
  const auto at = [&](int m) { return matrix + view.offset(m, geometry.hidden, geometry.intermediate); };

  sm.product.begin(view.rows(), view.columns());
  for (int m = 0; group.previous >= 0 && m < view.rows(); ++m) {
    std::copy(carried + at(m), carried + at(m) + view.columns(), sm.product.row(m));
  }
  std::vector<const Bf16*> gradients;
  std::vector<const Bf16*> tokens;
  for (std::int32_t tile = group.tile_begin; tile < group.tile_end; ++tile) {
    const std::int64_t first_row = std::int64_t{tile} * kTileRows;
    const int rows = sm.schedule.tiles[tile].rows;
    RowPointers token_rows;
    if (view.is_down) {
      gather_rows(sm, first_row, rows, sm.layout.shared.dout, sm.layout.workspace.ring_dout, token_rows.data());
    } else {
      gather_rows(sm, first_row, rows, sm.layout.shared.x, sm.layout.workspace.ring_x, token_rows.data());
    }
    for (int i = 0; i < rows; ++i) {
      const GradientRow row = gradient_row(sm, segment_row(sm, group.macrobatch, first_row + i));
      gradients.push_back(view.is_down ? row.weighted_hidden : (view.block.matrix == 0 ? row.gate : row.up));
      tokens.push_back(token_rows[static_cast<std::size_t>(i)]);
    }
  }
  add_rows_to_product(sm, view, gradients, tokens);

  // A buffer that is added to stays untouched where an expert has no rows: x + 0 could still turn -0 into 0.
  const bool untouched = sm.call->accumulate && group.previous < 0 && tokens.empty();
  const GradTarget& target = view.is_down ? sm.call->grad_down : sm.call->grad_gate_up;
  for (int m = 0; !untouched && m < view.rows(); ++m) {
    if (group.is_last) {
      deliver_row(sm.product.row(m), view.columns(), sm.call->accumulate,
                  target.f32 != nullptr ? target.f32 + at(m) : nullptr,
                  target.bf16 != nullptr ? target.bf16 + at(m) : nullptr);
    } else {
      std::copy(sm.product.row(m), sm.product.row(m) + view.columns(), carried + at(m));
    }
  }
  sm.add(sm.layout.counters.token_reads + group.macrobatch);
  sm.add(sm.layout.counters.row_reads + group.macrobatch);
  sm.record("wgrad", begin, task.group, task.minibatch);
}

// ---- shared expert: the rank's own tokens, no router weight, no push

GradientRow shared_gradient_row(const Sm& sm, std::int64_t token) {
  const std::int64_t width = sm.shape.shared_intermediate;
  Bf16* gate = sm.own_workspace(sm.layout.workspace.shared_dgate_up) + token * 2 * width;
  return {gate, gate + width, sm.own_workspace(sm.layout.workspace.shared_hidden) + token * width};
}

void shared_recompute(Sm& sm, const Task& task) {
  wait_for_own_x(sm);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first = std::int64_t{task.tile} * kTileRows;
  const int rows = own_tile_rows(sm, task.tile);
  RowPointers x_rows;
  matrix_rows(sm.own_shared(sm.layout.shared.x), sm.shape.hidden, first, rows, x_rows.data());
  const ColumnBlock block = column_block(task.column, protocol::kGateUpColumns, sm.shape.shared_intermediate);
  multiply_gate_up(sm, x_rows, rows, sm.call->shared_gate, sm.call->shared_up, block);
  const float clamp = clamp_bound(sm.shape.shared_clamp);
  for (int i = 0; i < rows; ++i) {
    const PreActivations kept = shared_row(sm, first + i);
    for (int c = 0; c < block.count; ++c) {
      kept.gate[block.begin + c] = math::round_gate(sm.product.row(i)[c], clamp);
      kept.up[block.begin + c] = math::round_linear(sm.product.row(i)[block.count + c], clamp);
    }
  }
  sm.add(sm.layout.counters.shared_recomputed + task.tile);
  sm.record("shared recompute", begin, task.tile);
}

void shared_dh(Sm& sm, const Task& task) {
  wait_for_own_x(sm);
  const std::int64_t width = sm.shape.shared_intermediate;
  if (sm.layout.geometry.saved_rows == 0) {
    sm.wait_counter(sm.layout.counters.shared_recomputed + task.tile,
                    protocol::Geometry::blocks(width, protocol::kGateUpColumns), "shared recomputed tile", task.tile);
  }
  const std::int64_t begin = sm.now_ns();
  const std::int64_t first = std::int64_t{task.tile} * kTileRows;
  const int rows = own_tile_rows(sm, task.tile);
  RowPointers dout_rows;
  matrix_rows(sm.own_shared(sm.layout.shared.dout), sm.shape.hidden, first, rows, dout_rows.data());
  const ColumnBlock block = column_block(task.column, protocol::kDhColumns, width);
  sm.product.begin(rows, block.count);
  sm.product.add_rows_by_matrix(dout_rows.data(), sm.call->shared_down + block.begin, width, sm.shape.hidden);
  for (int i = 0; i < rows; ++i) {
    swiglu_backward_row(sm.product.row(i), block, 1.0f, clamp_bound(sm.shape.shared_clamp), shared_row(sm, first + i),
                        shared_gradient_row(sm, first + i));
  }
  sm.add(sm.layout.counters.shared_hidden + task.tile);
  sm.record("shared dh", begin, task.tile);
}

void wait_for_shared_dh(Sm& sm, std::int32_t tile) {
  sm.wait_counter(sm.layout.counters.shared_hidden + tile,
                  protocol::Geometry::blocks(sm.shape.shared_intermediate, protocol::kDhColumns), "shared dh of tile",
                  tile);
}

void shared_dx(Sm& sm, const Task& task) {
  wait_for_shared_dh(sm, task.tile);
  const std::int64_t begin = sm.now_ns();
  const std::int64_t width = sm.shape.shared_intermediate;
  const std::int64_t hidden = sm.shape.hidden;
  const std::int64_t first = std::int64_t{task.tile} * kTileRows;
  const int rows = own_tile_rows(sm, task.tile);
  const ColumnBlock block = column_block(task.column, protocol::kDxColumns, hidden);
  sm.product.begin(rows, block.count);
  RowPointers gradient_rows;
  for (int i = 0; i < rows; ++i) gradient_rows[static_cast<std::size_t>(i)] = shared_gradient_row(sm, first + i).gate;
  sm.product.add_rows_by_matrix(gradient_rows.data(), sm.call->shared_gate + block.begin, hidden, width);
  for (int i = 0; i < rows; ++i) gradient_rows[static_cast<std::size_t>(i)] = shared_gradient_row(sm, first + i).up;
  sm.product.add_rows_by_matrix(gradient_rows.data(), sm.call->shared_up + block.begin, hidden, width);
  for (int i = 0; i < rows; ++i) {
    Bf16* to = sm.own_workspace(sm.layout.workspace.shared_y) + (first + i) * hidden + block.begin;
    std::transform(sm.product.row(i), sm.product.row(i) + block.count, to, to_bf16);
  }
  sm.record("shared dx", begin, task.tile);
}

void shared_wgrad(Sm& sm, const Task& task) {
  const std::int64_t width = sm.shape.shared_intermediate;
  const std::int64_t hidden = sm.shape.hidden;
  for (std::int32_t tile = 0; tile < protocol::Geometry::blocks(sm.call->tokens, kTileRows); ++tile) {
    wait_for_shared_dh(sm, tile);
  }
  const std::int64_t begin = sm.now_ns();
  const WgradView view = wgrad_view(hidden, width, task.column);
  std::vector<const Bf16*> gradients;
  std::vector<const Bf16*> tokens;
  const Bf16* own = sm.own_shared(view.is_down ? sm.layout.shared.dout : sm.layout.shared.x);
  for (std::int64_t token = 0; token < sm.call->tokens; ++token) {
    const GradientRow row = shared_gradient_row(sm, token);
    gradients.push_back(view.is_down ? row.weighted_hidden : (view.block.matrix == 0 ? row.gate : row.up));
    tokens.push_back(own + token * hidden);
  }
  sm.product.begin(view.rows(), view.columns());
  add_rows_to_product(sm, view, gradients, tokens);
  float* const targets[] = {sm.call->shared_grad_gate, sm.call->shared_grad_up, sm.call->shared_grad_down};
  for (int m = 0; m < view.rows(); ++m) {
    deliver_row(sm.product.row(m), view.columns(), false, targets[view.block.matrix] + view.offset(m, hidden, width),
                nullptr);
  }
  sm.record("shared wgrad", begin, task.column);
}

}  // namespace

void run_backward_task(Sm& sm, const TaskOrder& order, const Task& task) {
  switch (task.kind) {
    case TaskKind::kSharedRecompute:
      return shared_recompute(sm, task);
    case TaskKind::kSharedDh:
      return shared_dh(sm, task);
    case TaskKind::kSharedDx:
      return shared_dx(sm, task);
    case TaskKind::kSharedWgrad:
      return shared_wgrad(sm, task);
    case TaskKind::kRecompute:
      return recompute(sm, order, task);
    case TaskKind::kDh:
      return dh(sm, order, task);
    case TaskKind::kDx:
      return dx(sm, task);
    case TaskKind::kWgrad:
      return wgrad(sm, order, task);
    default:
      throw Error("a backward task order holds a forward task");
  }
}

}  // namespace moewave::cpu
