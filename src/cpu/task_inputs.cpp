#include "cpu/task_inputs.h"

namespace moewave::cpu {

void wait_for_own_x(Sm& sm) {
  if (sm.x_is_staged) return;
  sm.wait(sm.own_shared(sm.layout.shared.x_flags) + sm.rank(), sm.epoch, "entry", "x of rank", sm.rank());
  sm.x_is_staged = true;
}

void wait_for_tokens(Sm& sm, std::int32_t minibatch) {
  wait_for_own_x(sm);
  for (; sm.watermark <= minibatch; ++sm.watermark) {
    const std::int32_t pulls =
        sm.schedule.minibatches[sm.watermark + 1].pull_begin - sm.schedule.minibatches[sm.watermark].pull_begin;
    sm.wait_counter(sm.layout.counters.pulled + sm.watermark, pulls, "pull", sm.watermark);
  }
}

void gather_rows(const Sm& sm, std::int64_t first_row, int rows, const protocol::Place<Bf16>& staged,
                 const protocol::Place<Bf16>& ring, const Bf16** pointers) {
  const std::int64_t hidden = sm.shape.hidden;
  const Bf16* own = sm.own_shared(staged);
  const Bf16* copies = sm.own_workspace(ring);
  for (int i = 0; i < rows; ++i) {
    const std::int64_t source = sm.schedule.row_source[first_row + i];
    pointers[i] = source >= 0 ? copies + source * hidden : own + (-1 - source) * hidden;
  }
}

void multiply_gate_up(Sm& sm, const RowPointers& x_rows, int rows, const Bf16* gate, const Bf16* up,
                      ColumnBlock block) {
  RowPointers weight_rows;
  for (int i = 0; i < block.count; ++i) {
    weight_rows[static_cast<std::size_t>(i)] = gate + (block.begin + i) * sm.shape.hidden;
    weight_rows[static_cast<std::size_t>(block.count + i)] = up + (block.begin + i) * sm.shape.hidden;
  }
  sm.product.begin(rows, 2 * block.count);
  sm.product.add_rows_by_rows(x_rows.data(), weight_rows.data(), sm.shape.hidden);
}

PreActivations saved_row(const Sm& sm, std::int64_t row) {
  const std::int64_t width = sm.shape.intermediate;
  Bf16* gate = sm.layout.context.gate_up.at(sm.call->context) + row * 2 * width;
  return {gate, gate + width};
}

std::int64_t segment_row(const Sm& sm, std::int32_t macrobatch, std::int64_t row) {
  const protocol::Geometry& geometry = sm.layout.geometry;
  const std::int64_t first_row = std::int64_t{sm.schedule.macrobatches[macrobatch].tile_begin} * protocol::kTileRows;
  return (macrobatch % geometry.segments) * geometry.padded_segment_rows() + row - first_row;
}

PreActivations recomputed_row(const Sm& sm, std::int32_t macrobatch, std::int64_t row) {
  const std::int64_t width = sm.shape.intermediate;
  Bf16* gate = sm.own_workspace(sm.layout.workspace.recomputed) + segment_row(sm, macrobatch, row) * 2 * width;
  return {gate, gate + width};
}

PreActivations shared_row(const Sm& sm, std::int64_t token) {
  const std::int64_t width = sm.shape.shared_intermediate;
  const bool saved = sm.layout.geometry.saved_rows > 0;
  Bf16* base = saved ? sm.layout.context.shared_gate_up.at(sm.call->context)
                     : sm.own_workspace(sm.layout.workspace.shared_recomputed);
  Bf16* gate = base + token * 2 * width;
  return {gate, gate + width};
}

}  // namespace moewave::cpu
