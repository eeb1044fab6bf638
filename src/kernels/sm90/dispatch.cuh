// Dispatch: communicating blocks pull the token rows that this rank's experts need, each once, into the token ring.
//
// Waits for: x of all ranks; before the first pull of macrobatch m, the readers of every macrobatch up to m - segments.
// Produces: rows in the ring, then a count on the minibatch that uses a row first. Consumer: the producers of gate-up.
//
// Every warp moves as many rows at a time as its buffer holds, a row a lane: bulk copy in, bulk copy out.
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/entry.cuh"
#include "protocol/tasks.h"
#include "ptx/copies.cuh"

namespace moewave::sm90 {

/// Waits until the readers of macrobatches 0..last are done. By one thread.
__device__ __forceinline__ bool wait_for_segment(const Call& call, const protocol::Schedule& schedule,
                                                 std::int32_t first, std::int32_t last) {
  for (std::int32_t m = first; m <= last; ++m) {
    const std::int32_t tiles = schedule.macrobatches[m + 1].tile_begin - schedule.macrobatches[m].tile_begin;
    if (!call.wait<Scope::kGpu>(call.counter(call.params.layout.counters.token_reads + m),
                                static_cast<std::uint32_t>(tiles * call.geometry().gate_up_blocks()),
                                {Role::kDispatch, Awaited::kTokenSegment, static_cast<std::uint32_t>(m)},
                                call.params.pipeline_limit_ns)) {
      return false;
    }
  }
  return true;
}

class RowMover {
 public:
  __device__ __forceinline__ RowMover(const Call& call, BlockMemory& memory)
      : call_(call),
        row_bytes_(static_cast<std::uint32_t>(call.geometry().hidden * 2)),
        piece_bytes_(row_bytes_ < kDispatchBytes ? row_bytes_ : kDispatchBytes),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    buffer_ = ptx::shared_address(memory.dispatch[warp]) + static_cast<std::uint32_t>(lane_) * piece_bytes_;
    barrier_ = ptx::shared_address(&memory.pulled[warp]);
    while (rows_ < kWarp && (rows_ + 1) * piece_bytes_ <= kDispatchBytes) ++rows_;
  }

  __device__ __forceinline__ int rows() const { return rows_; }

  /// All lanes of the warp: lane l moves row `pull` + l if there is one below `end`, and counts it.
  __device__ __forceinline__ void move(const protocol::Schedule& schedule, std::int32_t pull, std::int32_t end,
                                       std::int64_t first_place) {
    const std::int32_t mine = pull + lane_;
    const bool moves = lane_ < rows_ && mine < end;
    const char* from = nullptr;
    char* to = nullptr;
    if (moves) {
      const protocol::TokenRef source = schedule.pull_source[mine];
      const protocol::SharedLayout& shared = call_.params.layout.shared;
      from = reinterpret_cast<const char*>(call_.shared_of(source.rank, shared.x)) +
             std::int64_t{source.token} * row_bytes_;
      to = reinterpret_cast<char*>(call_.workspace(call_.params.layout.workspace.ring_x)) +
           (first_place + lane_) * row_bytes_;
    }
    for (std::uint32_t done = 0; done < row_bytes_; done += piece_bytes_) {
      const std::uint32_t bytes = min(piece_bytes_, row_bytes_ - done);
      if (moves) {
        if (done > 0) ptx::wait_bulk_stores_read();
        ptx::arrive_expecting(barrier_, bytes);
        ptx::bulk_load(buffer_, from + done, bytes, barrier_);
      } else {
        ptx::arrive(barrier_);
      }
      wait_phase(barrier_, parity_, call_.params.pipeline_limit_ns);
      parity_ ^= 1u;
      if (moves) {
        ptx::bulk_store(to + done, buffer_, bytes);
        ptx::commit_bulk_stores();
      }
    }
    if (!moves) return;
    ptx::wait_bulk_stores_done();
    ptx::fence_proxy_async();
    while (mine >= schedule.minibatches[minibatch_ + 1].pull_begin) ++minibatch_;
    ptx::add_release_gpu(call_.counter(call_.params.layout.counters.pulled + minibatch_), 1);
  }

 private:
  const Call& call_;
  std::uint32_t row_bytes_;
  std::uint32_t piece_bytes_;
  int rows_ = 1;  // that the buffer holds, at most one a lane
  int lane_;
  std::uint32_t buffer_;
  std::uint32_t barrier_;
  std::uint32_t parity_ = 0;
  std::int32_t minibatch_ = 0;  // of this lane's last row
};

/// All threads of a communicating block; false on all of them when the call cannot go on.
__device__ __forceinline__ bool dispatch(const Call& call, BlockMemory& memory) {
  const ForwardParams& p = call.params;
  const protocol::Schedule schedule = call.schedule();
  if (schedule.totals->pulls == 0) return true;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const bool came = warp != 0 || wait_for_ranks(call, call.own_shared(p.layout.shared.x_flags), Role::kDispatch,
                                                Awaited::kXFlag, p.entry_limit_ns);
  if (__syncthreads_and(came ? 1 : 0) == 0) return false;
  ptx::fence_proxy_async();  // x was written, and will be read, by bulk copies

  RowMover mover(call, memory);
  // Neighbouring batches go to different SMs.
  const std::int32_t batch = mover.rows();
  const std::int32_t first = (warp * p.comm_blocks + static_cast<std::int32_t>(ptx::block_index())) * batch;
  const std::int32_t stride = kWarps * p.comm_blocks * batch;
  const int segments = call.geometry().segments;
  for (std::int32_t m = 0; m < schedule.totals->macrobatches; ++m) {
    const std::int32_t begin = schedule.macrobatches[m].pull_begin;
    const std::int32_t end = schedule.macrobatches[m + 1].pull_begin;
    if (m >= segments) {
      const bool is_free = threadIdx.x != 0 || wait_for_segment(call, schedule, m - segments, m - segments);
      if (__syncthreads_and(is_free ? 1 : 0) == 0) return false;
      ptx::fence_proxy_async();
    }
    const std::int64_t segment = (m % segments) * call.geometry().segment_tokens;
    for (std::int32_t pull = begin + first; pull < end; pull += stride) {
      call.jitter(0x10000u + static_cast<std::uint32_t>(pull));
      mover.move(schedule, pull, end, segment + pull - begin);
    }
  }
  return true;
}

}  // namespace moewave::sm90
