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
      __syncwarp();  // hands on to the other lanes what the first one acquired
      for (int peer = thread; peer < call.ranks(); peer += kWarp) {
        ptx::store_release_system(call.shared_of(peer, p.layout.shared.exit_flags) + call.rank(), call.epoch);
      }
    }
    const bool left = wait_for_ranks(call, call.own_shared(p.layout.shared.exit_flags), Role::kExit, Awaited::kExitFlag,
                                     p.pipeline_limit_ns);
    if (thread == 0) memory.all_left = left ? 1 : 0;
  }
  ptx::sync_threads(kConsumerBarrier, kConsumerThreads);
  return memory.all_left != 0;
}

// ---- Merge. A thread sums eight columns of a token at a time, up to eight slots a visit. The ids and weights of the
// visit after next and the rows of the next one are under way while the current one is summed.

inline constexpr int kSlotsAtOnce = 8;

class Merge {
 public:
  __device__ __forceinline__ explicit Merge(const Call& call) : call_(call), pieces_(call.geometry().hidden / 8) {
    const std::int64_t stride = std::int64_t{gridDim.x} * kConsumerThreads;
    tokens_apart_ = protocol::quotient(stride, pieces_);
    pieces_apart_ = stride - tokens_apart_ * pieces_;
  }

  /// By all consumer threads.
  __device__ __forceinline__ void run() const {
    const std::int64_t first = std::int64_t{ptx::block_index()} * kConsumerThreads + threadIdx.x - kProducerThreads;
    Visit visit{protocol::quotient(first, pieces_), protocol::remainder(first, pieces_), 0};
    Routes routes = load_routes(visit);
    Rows rows = load_rows(visit, routes);
    Visit next = after(visit);
    Routes next_routes = load_routes(next);
    float sums[8];
    while (visit.token < call_.params.tokens) {
      const Rows next_rows = load_rows(next, next_routes);
      const Visit later = after(next);
      const Routes later_routes = load_routes(later);
      if (visit.slot == 0) begin_sums(visit, sums);
      add(routes, rows, sums);
      if (next.slot == 0) store(visit, sums);
      visit = next, routes = next_routes, rows = next_rows;
      next = later, next_routes = later_routes;
    }
  }

 private:
  struct Visit {
    std::int64_t token;
    std::int64_t piece;  // of eight columns
    std::int32_t slot;   // the first one
  };
  struct Routes {
    float weight[kSlotsAtOnce];
    std::uint32_t exist;  // bit j: slot j of the visit has a result
  };
  struct Rows {
    uint4 y[kSlotsAtOnce];
  };

  __device__ __forceinline__ std::int32_t topk() const { return call_.geometry().topk; }

  __device__ __forceinline__ Visit after(Visit visit) const {
    visit.slot += kSlotsAtOnce;
    if (visit.slot < topk()) return visit;
    visit.slot = 0;
    visit.token += tokens_apart_;
    visit.piece += pieces_apart_;
    if (visit.piece >= pieces_) {
      visit.piece -= pieces_;
      ++visit.token;
    }
    return visit;
  }

  __device__ __forceinline__ Routes load_routes(const Visit& visit) const {
    const protocol::SharedLayout& shared = call_.params.layout.shared;
    const std::int64_t first = visit.token * topk() + visit.slot;
    const std::int32_t* ids = call_.own_shared(shared.ids) + first;
    const float* weights = call_.own_shared(shared.weights) + first;
    const std::int32_t count = visit.token < call_.params.tokens ? topk() - visit.slot : 0;
    Routes routes;
    routes.exist = 0;
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      const std::int32_t id = j < count ? ids[j] : -1;
      routes.weight[j] = j < count ? weights[j] : 0.0f;
      routes.exist |= id >= 0 && id < call_.geometry().experts ? 1u << j : 0u;
    }
    return routes;
  }

  __device__ __forceinline__ Rows load_rows(const Visit& visit, const Routes& routes) const {
    const uint4* slots = reinterpret_cast<const uint4*>(call_.own_shared(call_.params.layout.shared.slots)) +
                         (visit.token * topk() + visit.slot) * pieces_ + visit.piece;
    Rows rows;
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      if ((routes.exist >> j & 1u) != 0) rows.y[j] = __ldcs(slots + j * pieces_);
    }
    return rows;
  }

  // From the shared expert's row, or from zero.
  __device__ __forceinline__ void begin_sums(const Visit& visit, float (&sums)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
    if (call_.geometry().shared_intermediate == 0) return;
    const uint4* shared = reinterpret_cast<const uint4*>(call_.workspace(call_.params.layout.workspace.shared_y));
    const uint4 y = __ldcs(shared + visit.token * pieces_ + visit.piece);
    const std::uint32_t pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] = low_half(pairs[i]);
      sums[2 * i + 1] = high_half(pairs[i]);
    }
  }

  __device__ __forceinline__ static void add(const Routes& routes, const Rows& rows, float (&sums)[8]) {
#pragma unroll
    for (int j = 0; j < kSlotsAtOnce; ++j) {
      if ((routes.exist >> j & 1u) == 0) continue;
      const std::uint32_t pairs[4] = {rows.y[j].x, rows.y[j].y, rows.y[j].z, rows.y[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[2 * i] = fmaf(routes.weight[j], low_half(pairs[i]), sums[2 * i]);
        sums[2 * i + 1] = fmaf(routes.weight[j], high_half(pairs[i]), sums[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(const Visit& visit, const float (&sums)[8]) const {
    __stcs(reinterpret_cast<uint4*>(call_.params.output) + visit.token * pieces_ + visit.piece,
           make_uint4(round_pair(sums[0], sums[1]), round_pair(sums[2], sums[3]), round_pair(sums[4], sums[5]),
                      round_pair(sums[6], sums[7])));
  }

  const Call& call_;
  std::int64_t pieces_;  // of a row
  std::int64_t tokens_apart_;
  std::int64_t pieces_apart_;
};

}  // namespace moewave::sm90
