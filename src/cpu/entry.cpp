// Entry: stage what peers will read, tell them, wait for them, and build the schedule from all ranks' ids.
#include "protocol/entry.h"

#include <algorithm>
#include <cstring>

#include "cpu/sm.h"
#include "layer/configuration_hash.h"
#include "layer/scratch_places.h"

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

// Every SM poisons its part of everything that a call must write before it is read.
void poison_scratch(const Sm& sm) {
  const auto poison = [&](void* base, const auto& place) {
    const Part part = part_of(sm, place.bytes());
    std::memset(reinterpret_cast<char*>(place.at(base)) + part.begin, kPoisonByte,
                static_cast<std::size_t>(part.end - part.begin));
  };
  for_each_scratch_place(sm.layout.workspace, sm.memory.workspace.get(), poison);
  for_each_scratch_place(sm.layout.shared, sm.memory.shared.get(), poison);
  if (!sm.call->backward) poison(sm.call->context, Place<char>{0, sm.layout.context.bytes});
}

void announce(Sm& sm) {
  const bool enters_backward = sm.call->backward != sm.call->disagrees;
  EntryHeader header{};
  header.epoch = sm.epoch;
  header.direction = enters_backward ? protocol::kBackward : protocol::kForward;
  header.refused = sm.call->tokens > sm.layout.geometry.max_tokens ? 1 : 0;
  header.tokens = sm.call->tokens;
  header.topk = sm.shape.topk;
  header.configuration = configuration_hash(sm.layout.geometry);
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
