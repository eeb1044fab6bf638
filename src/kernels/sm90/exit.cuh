// Exit: tell every peer that this rank is done with everything remote, wait for all, merge the own tokens.
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/entry.cuh"
#include "kernels/sm90/swiglu.cuh"

namespace moewave::sm90 {

/// The last block of the rank: nothing of this call is under way any more, at any peer.
__device__ __forceinline__ void close_call(const Call& call) {
  const ForwardParams& p = call.params;
  *call.workspace(p.layout.workspace.epoch) = call.epoch;
  const std::int64_t bad = call.schedule().totals->bad_route;
  HostWords& host = *p.host;
  if (bad == protocol::kNoBadRoute || host.has_bad_route != 0) return;
  host.bad_route = bad;
  host.bad_route_epoch = call.epoch;
  ptx::store_release_system(&host.has_bad_route, 1);
}

/// All consumer threads, after their stores are complete. Waits for: all blocks of this rank, then the exit flags of
/// all ranks. Produces: the exit flags of this rank at every peer. Consumers: all ranks' merges and next calls.
/// False on all of them when the call cannot go on.
__device__ __forceinline__ bool leave(const Call& call, BlockMemory& memory) {
  const ForwardParams& p = call.params;
  const int thread = static_cast<int>(threadIdx.x) - kProducerThreads;
  ptx::fence_proxy_async();  // pushes are bulk copies
  ptx::sync_threads(kConsumerBarrier, kConsumerThreads);
  if (thread < kWarp) {
    bool is_last = false;
    if (thread == 0 && !call.is_stopped()) {
      ptx::fence_acq_rel_system();
      is_last = ptx::fetch_add_acq_rel_gpu(call.counter(p.layout.counters.finished), 1) == gridDim.x - 1;
      if (is_last) {
        close_call(call);
        ptx::fence_acq_rel_system();
      }
    }
    if (__shfl_sync(0xffffffffu, is_last ? 1 : 0, 0) != 0) {
      for (int peer = thread; peer < call.ranks(); peer += kWarp) {
        ptx::store_release_system(call.shared_of(peer, p.layout.shared.exit_flags) + call.rank(), call.epoch);
      }
    }
    const bool left = wait_for_ranks(call, call.own_shared(p.layout.shared.exit_flags), Role::kExit,
                                     Awaited::kExitFlag, p.pipeline_limit_ns);
    if (thread == 0) memory.all_left = left ? 1 : 0;
  }
  ptx::sync_threads(kConsumerBarrier, kConsumerThreads);
  return memory.all_left != 0;
}

// Adds w * y of up to kSlotsAtOnce slots to the sums of eight columns. The loads of all come first.
inline constexpr int kSlotsAtOnce = 8;
__device__ __forceinline__ void add_slots(const uint4* slots, std::int64_t row_pieces, const std::int32_t* ids,
                                          const float* weights, std::int32_t count, std::int32_t experts,
                                          float (&sums)[8]) {
  uint4 y[kSlotsAtOnce];
  float weight[kSlotsAtOnce];
  bool exists[kSlotsAtOnce];
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    const std::int32_t id = j < count ? ids[j] : -1;
    exists[j] = id >= 0 && id < experts;
    if (exists[j]) {
      weight[j] = weights[j];
      y[j] = __ldcs(slots + j * row_pieces);
    }
  }
#pragma unroll
  for (int j = 0; j < kSlotsAtOnce; ++j) {
    if (!exists[j]) continue;
    const std::uint32_t pairs[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] = fmaf(weight[j], low_half(pairs[i]), sums[2 * i]);
      sums[2 * i + 1] = fmaf(weight[j], high_half(pairs[i]), sums[2 * i + 1]);
    }
  }
}

/// All consumer threads. Each sums eight columns of a token at a time, in the order of its slots.
__device__ __forceinline__ void merge(const Call& call) {
  const ForwardParams& p = call.params;
  const std::int32_t topk = call.geometry().topk;
  const std::int64_t pieces = call.geometry().hidden / 8;  // of a row
  const uint4* slots = reinterpret_cast<const uint4*>(call.own_shared(p.layout.shared.slots));
  const uint4* shared = reinterpret_cast<const uint4*>(call.workspace(p.layout.workspace.shared_y));
  const std::int32_t* ids = call.own_shared(p.layout.shared.ids);
  const float* weights = call.own_shared(p.layout.shared.weights);
  uint4* output = reinterpret_cast<uint4*>(p.output);

  const std::int64_t stride = std::int64_t{gridDim.x} * kConsumerThreads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kConsumerThreads + threadIdx.x - kProducerThreads;
  const std::int64_t tokens_apart = protocol::quotient(stride, pieces);
  const std::int64_t pieces_apart = stride - tokens_apart * pieces;
  std::int64_t token = protocol::quotient(first, pieces);
  std::int64_t piece = first - token * pieces;
  while (token < p.tokens) {
    float sums[8] = {};
    if (call.geometry().shared_intermediate > 0) {
      const uint4 y = __ldcs(shared + token * pieces + piece);
      const std::uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[2 * i] = low_half(pairs[i]);
        sums[2 * i + 1] = high_half(pairs[i]);
      }
    }
    for (std::int32_t slot = 0; slot < topk; slot += kSlotsAtOnce) {
      const std::int64_t route = token * topk + slot;
      add_slots(slots + route * pieces + piece, pieces, ids + route, weights + route, topk - slot,
                call.geometry().experts, sums);
    }
    __stcs(output + token * pieces + piece,
           make_uint4(round_pair(sums[0], sums[1]), round_pair(sums[2], sums[3]), round_pair(sums[4], sums[5]),
                      round_pair(sums[6], sums[7])));
    token += tokens_apart;
    piece += pieces_apart;
    if (piece >= pieces) {
      piece -= pieces;
      ++token;
    }
  }
}

}  // namespace moewave::sm90
