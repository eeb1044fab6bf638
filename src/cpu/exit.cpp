// Exit: tell every peer that this rank is done with everything remote, wait for all, merge the own tokens.
#include <algorithm>
#include <cmath>

#include "cpu/sm.h"
#include "layer/call_report.h"

namespace moewave::cpu {
namespace {

bool is_route(const Sm& sm, std::int32_t id) { return id >= 0 && id < sm.shape.experts; }

const Bf16* slot_of(const Sm& sm, std::int64_t route) {
  return sm.own_shared(sm.layout.shared.slots) + route * sm.shape.hidden;
}

// Sums of one token start from the shared expert's row, or from zero.
void begin_sums(const Sm& sm, std::int64_t token, std::vector<float>& sums) {
  const std::int64_t hidden = sm.shape.hidden;
  if (sm.shape.shared_intermediate == 0) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    return;
  }
  const Bf16* shared = sm.own_workspace(sm.layout.workspace.shared_y) + token * hidden;
  std::transform(shared, shared + hidden, sums.begin(), to_float);
}

void merge_output(const Sm& sm, std::int64_t token, std::vector<float>& sums) {
  const std::int32_t* ids = sm.own_shared(sm.layout.shared.ids);
  const float* weights = sm.own_shared(sm.layout.shared.weights);
  for (std::int64_t slot = 0; slot < sm.shape.topk; ++slot) {
    const std::int64_t route = token * sm.shape.topk + slot;
    if (!is_route(sm, ids[route])) continue;
    const Bf16* y = slot_of(sm, route);
    for (std::size_t c = 0; c < sums.size(); ++c) sums[c] = std::fma(weights[route], to_float(y[c]), sums[c]);
  }
}

void merge_gradient(const Sm& sm, std::int64_t token, std::vector<float>& sums) {
  const std::int32_t* ids = sm.own_shared(sm.layout.shared.ids);
  const std::int32_t blocks = sm.layout.geometry.dh_blocks();
  for (std::int64_t slot = 0; slot < sm.shape.topk; ++slot) {
    const std::int64_t route = token * sm.shape.topk + slot;
    float router_gradient = 0.0f;
    if (is_route(sm, ids[route])) {
      const Bf16* dx = slot_of(sm, route);
      for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += to_float(dx[c]);
      const float* partials = sm.own_shared(sm.layout.shared.router_partials) + route * blocks;
      for (std::int32_t block = 0; block < blocks; ++block) router_gradient += partials[block];
    }
    sm.call->grad_weights[route] = router_gradient;
  }
}

}  // namespace

void abandon(Sm& sm) {
  sm.role = "finish";
  sm.barrier("finish barrier");
  if (sm.index != 0) return;
  *sm.own_workspace(sm.layout.workspace.epoch) = sm.epoch;
  if (sm.call->backward) return;
  // A backward call may already be queued behind this one: the schedule that it finds has nothing to do.
  *sm.schedule.totals = {};
  sm.schedule.macrobatches[0] = {};
  sm.schedule.minibatches[0] = {};
}

void leave(Sm& sm) {
  sm.role = "exit";
  sm.jitter();
  const std::int64_t begin = sm.now_ns();
  // Everything remote that this SM read or wrote lies before its release on `finished`; SM 0 acquires all of them and
  // releases the exit flags, so a peer that sees the flag sees every push and no read is still under way.
  sm.add(sm.layout.counters.finished);
  if (sm.index == 0) {
    sm.wait_counter(sm.layout.counters.finished, sm.tuning.sms, "exit barrier", 0);
    for (int peer = 0; peer < sm.peers.size; ++peer) {
      sm.raise(sm.shared_of(peer, sm.layout.shared.exit_flags) + sm.rank(), sm.epoch);
    }
  }
  for (int source = 0; source < sm.peers.size; ++source) {
    sm.wait(sm.own_shared(sm.layout.shared.exit_flags) + source, sm.epoch, "exit", "exit of rank", source);
  }
  sm.record("exit", begin, 0);
}

void merge(Sm& sm) {
  sm.role = "merge";
  sm.jitter();
  const std::int64_t begin = sm.now_ns();
  std::vector<float> sums(static_cast<std::size_t>(sm.shape.hidden));
  for (std::int64_t token = sm.index; token < sm.call->tokens; token += sm.tuning.sms) {
    begin_sums(sm, token, sums);
    if (sm.call->backward) {
      merge_gradient(sm, token, sums);
    } else {
      merge_output(sm, token, sums);
    }
    std::transform(sums.begin(), sums.end(), sm.call->output + token * sm.shape.hidden, to_bf16);
  }
  sm.record("merge", begin, 0);
}

void finish(Sm& sm) {
  sm.role = "finish";
  sm.barrier("finish barrier");
  if (sm.index != 0) return;
  *sm.own_workspace(sm.layout.workspace.epoch) = sm.epoch;
  *sm.call->stats = describe_rank({sm.layout.geometry, sm.rank(), sm.call->backward, sm.call->tokens,
                                   sm.own_shared(sm.layout.shared.ids), sm.schedule},
                                  sm.call->report);
  if (!sm.call->backward && sm.schedule.totals->bad_route != protocol::kNoBadRoute) {
    const std::lock_guard lock(sm.run.mutex);
    std::int64_t& bad = sm.run.bad_routes[static_cast<std::size_t>(sm.call_number)];
    bad = std::min(bad, sm.schedule.totals->bad_route);
  }
}

}  // namespace moewave::cpu
