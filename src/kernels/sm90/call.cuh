// One call as a block sees it: where things lie, bounded waits, and the end of a call that cannot go on.
#pragma once

#include <cstdint>

#include "kernels/sm90/forward_kernel.h"
#include "protocol/entry.h"
#include "ptx/synchronization.cuh"

namespace moewave::sm90 {

/// Who waits for what. It goes into the stop record when the wait is too long.
struct Wait {
  Role role;
  Awaited awaited;
  std::uint32_t number;
};

/// Which threads a wait's word is shared with.
enum class Scope { kGpu, kSystem };

struct Call {
  const ForwardParams& params;
  std::uint32_t epoch;

  __device__ __forceinline__ Call(const ForwardParams& p, std::uint32_t e) : params(p), epoch(e) {}

  // ---- Memory

  __device__ __forceinline__ int rank() const { return params.peers.rank; }
  __device__ __forceinline__ int ranks() const { return params.peers.size; }
  __device__ __forceinline__ const protocol::Geometry& geometry() const { return params.layout.geometry; }

  template <typename T>
  __device__ __forceinline__ T* shared_of(int peer, const protocol::Place<T>& place) const {
    return place.at(params.peers.base[peer]);
  }
  template <typename T>
  __device__ __forceinline__ T* own_shared(const protocol::Place<T>& place) const {
    return shared_of(params.peers.rank, place);
  }
  template <typename T>
  __device__ __forceinline__ T* workspace(const protocol::Place<T>& place) const {
    return place.at(params.workspace);
  }
  __device__ __forceinline__ protocol::Schedule schedule() const {
    return params.layout.context.schedule(params.context);
  }
  /// Counter of this call; the set of the other parity is being cleared for the next one.
  __device__ __forceinline__ std::uint32_t* counter(std::int64_t number) const {
    return workspace(params.layout.workspace.counters) + (epoch & 1u) * params.layout.counters.size + number;
  }
  __device__ __forceinline__ std::uint32_t* other_counter(std::int64_t number) const {
    return workspace(params.layout.workspace.counters) + ((epoch + 1) & 1u) * params.layout.counters.size + number;
  }

  // ---- Waiting

  /// Some rank gave up: nothing of this call is to be relied on.
  __device__ __forceinline__ bool is_stopped() const {
    return ptx::load_acquire_system(own_shared(params.layout.shared.abort)) != 0;
  }

  /// Waits until `word` has reached `wanted` (acquire). False when the limit is over or some rank gave up.
  template <Scope kScope>
  __device__ __forceinline__ bool wait(const std::uint32_t* word, std::uint32_t wanted, Wait what,
                                       std::uint64_t limit_ns) const {
    std::uint32_t seen = load<kScope>(word);
    if (protocol::has_reached(seen, wanted)) return true;
    const std::uint64_t begin = ptx::global_time_ns();
    for (;;) {
      for (int i = 0; i < kPollsBetweenChecks; ++i) {
        seen = load<kScope>(word);
        if (protocol::has_reached(seen, wanted)) return true;
      }
      if (is_stopped()) return false;
      if (ptx::global_time_ns() - begin > limit_ns) {
        stop(what, wanted, seen);
        return false;
      }
    }
  }

  /// Leaves the record of the first wait that was too long and tells every rank.
  __device__ __forceinline__ void stop(Wait what, std::uint32_t wanted, std::uint32_t seen) const {
    StopRecord& record = params.host->stop;
    if (ptx::compare_exchange_system(&record.state, 0, 1) == 0) {
      record.block = ptx::block_index();
      record.role = what.role;
      record.awaited = what.awaited;
      record.number = what.number;
      record.wanted = wanted;
      record.seen = seen;
      record.epoch = epoch;
      ptx::store_release_system(&record.state, 2);
    }
    for (int peer = 0; peer < ranks(); ++peer) {
      ptx::store_release_system(shared_of(peer, params.layout.shared.abort), 1);
    }
  }

  // ---- Tests

  /// Holds this thread back at random, now and then.
  __device__ __forceinline__ void jitter(std::uint32_t place) const {
    if (params.jitter_ns == 0) return;
    std::uint32_t hash = (epoch * 0x9e3779b9u) ^ (ptx::block_index() * 0x85ebca6bu) ^ (place * 0xc2b2ae35u) ^
                         (static_cast<std::uint32_t>(rank()) * 0x27d4eb2fu);
    hash ^= hash >> 15, hash *= 0x2c1b3c6du, hash ^= hash >> 12, hash *= 0x297a2d39u, hash ^= hash >> 15;
    if (hash % 8 != 0) return;
    const std::uint64_t end = ptx::global_time_ns() + (hash >> 3) % params.jitter_ns;
    while (ptx::global_time_ns() < end) ptx::sleep_ns(500);
  }

 private:
  static constexpr int kPollsBetweenChecks = 64;

  template <Scope kScope>
  __device__ __forceinline__ static std::uint32_t load(const std::uint32_t* word) {
    return kScope == Scope::kGpu ? ptx::load_acquire_gpu(word) : ptx::load_acquire_system(word);
  }
};

/// One thread's track of the timeline.
class Track {
 public:
  __device__ __forceinline__ Track(const Trace& trace, int track) : trace_(trace), track_(track) {}

  __device__ __forceinline__ std::uint64_t now() const { return trace_.events == nullptr ? 0 : ptx::global_time_ns(); }
  __device__ __forceinline__ void record(TraceName name, std::uint64_t begin, std::int32_t index = -1,
                                         std::int32_t minibatch = -1) const {
    if (trace_.events == nullptr) return;
    const std::uint32_t line = ptx::block_index() * kTraceTracks + static_cast<std::uint32_t>(track_);
    const std::uint32_t place = trace_.counts[line]++;
    if (place >= trace_.capacity) return;
    trace_.events[static_cast<std::uint64_t>(line) * trace_.capacity + place] = {
        begin, ptx::global_time_ns(), name, index, minibatch, ptx::sm_id()};
  }

 private:
  const Trace& trace_;
  int track_;
};

}  // namespace moewave::sm90
