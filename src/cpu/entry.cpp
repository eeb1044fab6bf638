// Entry: stage what peers will read, tell them, wait for them, and build the schedule from all ranks' ids.
#include "protocol/entry.h"

#include <algorithm>
#include <cstring>

#include "cpu/sm.h"

namespace moewave::cpu {
namespace {

using protocol::EntryHeader;
using protocol::EntryVerdict;
using protocol::Place;

// This SM's part of a list that all SMs of the rank share.
struct Part {
  std::int64_t begin;
  std::int64_t end;
};
Part part_of(const Sm& sm, std::int64_t count) {
  return {count * sm.index / sm.tuning.sms, count * (sm.index + 1) / sm.tuning.sms};
}

template <typename T>
void stage(const Sm& sm, const T* from, T* to, std::int64_t count) {
  const Part part = part_of(sm, count);
  if (part.begin < part.end) std::copy(from + part.begin, from + part.end, to + part.begin);
}

// 0xff bytes: NaN as BF16 and FP32, absurd as an index. Everything that a call must write before it is read.
template <typename T>
void poison(const Sm& sm, void* base, const Place<T>& place) {
  const Part part = part_of(sm, place.bytes());
  std::memset(reinterpret_cast<char*>(place.at(base)) + part.begin, 0xff,
              static_cast<std::size_t>(part.end - part.begin));
}

void poison_scratch(const Sm& sm) {
  void* workspace = sm.memory.workspace.get();
  const protocol::WorkspaceLayout& w = sm.layout.workspace;
  poison(sm, workspace, w.local_expert);
  poison(sm, workspace, w.block_rows);
  poison(sm, workspace, w.block_pulls);
  poison(sm, workspace, w.block_load);
  poison(sm, workspace, w.group_rows);
  poison(sm, workspace, w.group_pulls);
  poison(sm, workspace, w.group_tile);
  poison(sm, workspace, w.group_pull);
  poison(sm, workspace, w.last_group);
  poison(sm, workspace, w.ring_x);
  poison(sm, workspace, w.ring_dout);
  poison(sm, workspace, w.hidden_ring);
  poison(sm, workspace, w.dgate_up);
  poison(sm, workspace, w.weighted_hidden);
  poison(sm, workspace, w.recomputed);
  poison(sm, workspace, w.carried_gate_up);
  poison(sm, workspace, w.carried_down);
  poison(sm, workspace, w.shared_hidden);
  poison(sm, workspace, w.shared_y);
  poison(sm, workspace, w.shared_dgate_up);
  poison(sm, workspace, w.shared_recomputed);
  // Staged inputs and slots of the previous call: no peer touches them before this rank raises its flags.
  void* shared = sm.memory.shared.get();
  const protocol::SharedLayout& s = sm.layout.shared;
  poison(sm, shared, s.ids);
  poison(sm, shared, s.weights);
  poison(sm, shared, s.x);
  poison(sm, shared, s.dout);
  poison(sm, shared, s.slots);
  poison(sm, shared, s.router_partials);
  if (!sm.call->backward) {
    char* context = static_cast<char*>(sm.call->context);
    const Part part = part_of(sm, sm.layout.context.bytes);
    std::memset(context + part.begin, 0xff, static_cast<std::size_t>(part.end - part.begin));
  }
}

std::uint64_t configuration_hash(const Sm& sm) {
  const protocol::Geometry& g = sm.layout.geometry;
  const std::int64_t values[] = {
      g.ranks,      g.experts,         g.topk,     g.hidden,         g.intermediate, g.shared_intermediate,
      g.max_tokens, g.minibatch_tiles, g.segments, g.segment_tokens, g.segment_rows, g.saved_rows};
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a over the values
  for (const std::int64_t value : values) hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3u;
  return hash;
}

void announce(Sm& sm) {
  const bool enters_backward = sm.call->backward != sm.call->disagrees;
  EntryHeader header{};
  header.epoch = sm.epoch;
  header.direction = enters_backward ? protocol::kBackward : protocol::kForward;
  header.refused = sm.call->tokens > sm.layout.geometry.max_tokens ? 1 : 0;
  header.tokens = sm.call->tokens;
  header.topk = sm.shape.topk;
  header.configuration = configuration_hash(sm);
  for (int peer = 0; peer < sm.peers.size; ++peer) {
    EntryHeader* headers = sm.shared_of(peer, sm.layout.shared.headers) + (sm.epoch & 1u) * sm.peers.size;
    headers[sm.rank()] = header;
    sm.raise(sm.shared_of(peer, sm.layout.shared.ids_flags) + sm.rank(), sm.epoch);
  }
}

bool accept_headers(Sm& sm) {
  for (int source = 0; source < sm.peers.size; ++source) {
    sm.wait(sm.own_shared(sm.layout.shared.ids_flags) + source, sm.epoch, "entry", "ids of rank", source);
  }
  const EntryHeader* headers = sm.own_shared(sm.layout.shared.headers) + (sm.epoch & 1u) * sm.peers.size;
  const protocol::EntryDecision decision = protocol::judge_entry(headers, sm.peers.size);
  if (sm.index == 0 && decision.verdict != EntryVerdict::kGo) {
    const std::lock_guard lock(sm.run.mutex);
    sm.run.verdicts[static_cast<std::size_t>(sm.call_number)] = decision.verdict;
    sm.run.verdict_ranks[static_cast<std::size_t>(sm.call_number)] = decision.rank;
  }
  for (int source = 0; source < sm.peers.size; ++source) {
    sm.tokens_per_rank[static_cast<std::size_t>(source)] = static_cast<std::int32_t>(headers[source].tokens);
  }
  return decision.verdict == EntryVerdict::kGo;
}

}  // namespace

bool enter(Sm& sm) {
  sm.role = "entry";
  sm.jitter();
  const std::int64_t begin = sm.now_ns();
  const RankCall& call = *sm.call;
  const protocol::SharedLayout& shared = sm.layout.shared;
  const bool fits = call.tokens <= sm.layout.geometry.max_tokens;
  const std::int64_t routes = fits ? call.tokens * sm.shape.topk : 0;
  const std::int64_t elements = fits ? call.tokens * sm.shape.hidden : 0;

  const Part words = part_of(sm, sm.layout.counters.size);
  std::fill(sm.other_counters() + words.begin, sm.other_counters() + words.end, 0u);
  if (sm.options.poison) {
    poison_scratch(sm);
    sm.barrier("entry barrier");
  }
  stage(sm, call.ids, sm.own_shared(shared.ids), routes);
  stage(sm, call.weights, sm.own_shared(shared.weights), routes);
  if (sm.index == 0 && !call.backward) sm.schedule.totals->bad_route = protocol::kNoBadRoute;
  sm.barrier("entry barrier");
  if (sm.index == 0) announce(sm);

  stage(sm, call.x, sm.own_shared(shared.x), elements);
  if (call.backward) stage(sm, call.dout, sm.own_shared(shared.dout), elements);
  sm.barrier("entry barrier");
  if (sm.index == 0) {
    for (int peer = 0; peer < sm.peers.size; ++peer) {
      sm.raise(sm.shared_of(peer, shared.x_flags) + sm.rank(), sm.epoch);
    }
  }
  const bool go = accept_headers(sm);
  sm.record("entry", begin, 0);
  return go;
}

void build_schedule(Sm& sm) {
  sm.role = "schedule";
  sm.jitter();
  const std::int64_t begin = sm.now_ns();
  if (sm.index == 0) {
    std::copy(sm.tokens_per_rank.begin(), sm.tokens_per_rank.end(),
              sm.layout.context.tokens_per_rank.at(sm.call->context));
  }
  protocol::PlaceScratch places;
  protocol::build_schedule<protocol::SingleLane>(
      sm.schedule_task(), sm.index, sm.tuning.sms, places,
      [&](int source) -> const std::int32_t* { return sm.shared_of(source, sm.layout.shared.ids); },
      [&] {
        sm.barrier("schedule barrier");  // ends the call by an exception where the kernel's says no
        return true;
      });
  sm.record("schedule", begin, 0);
}

}  // namespace moewave::cpu
