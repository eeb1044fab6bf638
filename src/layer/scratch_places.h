// Which memory a call writes before it reads it. Tests fill it with NaN patterns beforehand.
#pragma once

#include "protocol/layout.h"

namespace moewave {

/// 0xff bytes: NaN as BF16 and FP32, absurd as an index.
inline constexpr int kPoisonByte = 0xff;

/// Calls visit(workspace, place) for every such place of a rank's workspace.
template <typename Visit>
void for_each_scratch_place(const protocol::WorkspaceLayout& w, void* workspace, Visit&& visit) {
  visit(workspace, w.tokens_per_rank);
  visit(workspace, w.local_expert);
  visit(workspace, w.block_rows);
  visit(workspace, w.block_pulls);
  visit(workspace, w.block_load);
  visit(workspace, w.group_rows);
  visit(workspace, w.group_pulls);
  visit(workspace, w.group_tile);
  visit(workspace, w.group_pull);
  visit(workspace, w.last_group);
  visit(workspace, w.ring_x);
  visit(workspace, w.ring_dout);
  visit(workspace, w.hidden_ring);
  visit(workspace, w.dgate_up);
  visit(workspace, w.weighted_hidden);
  visit(workspace, w.recomputed);
  visit(workspace, w.carried_gate_up);
  visit(workspace, w.carried_down);
  visit(workspace, w.task_count);
  visit(workspace, w.tasks);
  visit(workspace, w.shared_hidden);
  visit(workspace, w.shared_y);
  visit(workspace, w.shared_dgate_up);
  visit(workspace, w.shared_recomputed);
}

/// The same of a rank's shared memory: staged inputs and slots of the previous call. No peer touches them between the
/// end of this rank's call, which has seen all exit flags, and this rank's next flags.
template <typename Visit>
void for_each_scratch_place(const protocol::SharedLayout& s, void* shared, Visit&& visit) {
  visit(shared, s.ids);
  visit(shared, s.weights);
  visit(shared, s.x);
  visit(shared, s.dout);
  visit(shared, s.slots);
  visit(shared, s.router_partials);
}

}  // namespace moewave
