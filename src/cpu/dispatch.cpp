// Dispatch: communicating SMs pull the token rows that this rank's experts need, each once, into the token ring.
//
// Waits for: all ranks' x; before the first pull of macrobatch m, that all readers of every macrobatch up to m -
// segments are done. Produces: rows in the ring, then the pull counter of the minibatch that uses them first.
// Consumers: gate-up, recompute, dh and wgrad tasks.
#include <algorithm>

#include "cpu/sm.h"
#include "protocol/tasks.h"

namespace moewave::cpu {
namespace {

constexpr int kPullsPerCount = 16;  // pulls between two raises of the counter

void copy_row(Sm& sm, const protocol::Place<Bf16>& staged, const protocol::Place<Bf16>& ring, protocol::TokenRef source,
              std::int64_t place) {
  const std::int64_t hidden = sm.shape.hidden;
  const Bf16* from = sm.shared_of(source.rank, staged) + source.token * hidden;
  std::copy(from, from + hidden, sm.own_workspace(ring) + place * hidden);
}

}  // namespace

void dispatch(Sm& sm) {
  sm.role = "dispatch";
  sm.jitter();
  const protocol::Geometry& geometry = sm.layout.geometry;
  const protocol::Schedule& schedule = sm.schedule;
  const protocol::TaskOrder order(geometry, schedule, static_cast<std::int32_t>(sm.call->tokens), sm.call->backward);
  for (int source = 0; source < sm.peers.size; ++source) {
    sm.wait(sm.own_shared(sm.layout.shared.x_flags) + source, sm.epoch, "entry", "x of rank", source);
  }

  const std::int32_t stride = sm.tuning.comm_sms;
  std::int32_t pull = sm.index;
  std::int32_t minibatch = 0;
  std::int32_t freed = 0;  // macrobatches whose token copies this SM has seen done with
  std::uint32_t uncounted = 0;
  std::int64_t begin = sm.now_ns();
  const auto count_pulls = [&] {
    if (uncounted == 0) return;
    sm.add(sm.layout.counters.pulled + minibatch, uncounted);
    sm.record("pull", begin, pull, minibatch);
    uncounted = 0;
    begin = sm.now_ns();
  };

  for (std::int32_t m = 0; m < schedule.totals->macrobatches; ++m) {
    const std::int32_t pull_end = schedule.macrobatches[m + 1].pull_begin;
    if (pull >= pull_end) continue;
    if (freed <= m - geometry.segments) count_pulls();
    for (; freed <= m - geometry.segments; ++freed) {
      sm.wait_counter(sm.layout.counters.token_reads + freed, order.token_readers(freed), "token ring", freed);
      begin = sm.now_ns();
    }
    const std::int64_t segment_begin = (m % geometry.segments) * geometry.segment_tokens;
    for (; pull < pull_end; pull += stride) {
      if (pull >= schedule.minibatches[minibatch + 1].pull_begin) {
        count_pulls();
        while (pull >= schedule.minibatches[minibatch + 1].pull_begin) ++minibatch;
      }
      sm.task_jitter();
      const std::int64_t place = segment_begin + pull - schedule.macrobatches[m].pull_begin;
      const protocol::TokenRef source = schedule.pull_source[pull];
      copy_row(sm, sm.layout.shared.x, sm.layout.workspace.ring_x, source, place);
      if (sm.call->backward) copy_row(sm, sm.layout.shared.dout, sm.layout.workspace.ring_dout, source, place);
      if (++uncounted == kPullsPerCount) count_pulls();
    }
  }
  count_pulls();
}

}  // namespace moewave::cpu
