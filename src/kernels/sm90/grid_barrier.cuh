// A barrier of all blocks of a cooperative launch, with a limit on the wait.
//
// Order. A thread's writes reach thread 0 of its block by __syncthreads, are released by its addition at GPU scope and
// acquired by thread 0 of every other block, whose __syncthreads hands them on to that block's threads.
#pragma once

#include <cstdint>

#include "kernels/sm90/schedule_kernel.h"
#include "protocol/entry.h"
#include "ptx/synchronization.cuh"

namespace moewave::sm90 {

class GridBarrier {
 public:
  __device__ GridBarrier(GridBarrierState* state, std::uint64_t limit_ns) : state_(state), limit_ns_(limit_ns) {}

  /// Called by all threads of all blocks equally often. When the limit is reached, or another block has reached it, the
  /// block ends here: what the others were to write may be missing.
  __device__ void arrive_and_wait() {
    ++round_;
    __syncthreads();
    const bool arrived = threadIdx.x != 0 || wait_for_all();
    if (__syncthreads_and(arrived ? 1 : 0) == 0) ptx::exit_thread();
  }

 private:
  __device__ bool wait_for_all() const {
    ptx::add_release_gpu(&state_->arrived, 1);
    const std::uint32_t wanted = round_ * gridDim.x;
    std::uint64_t begin = 0;
    for (;;) {
      const std::uint32_t seen = ptx::load_acquire_gpu(&state_->arrived);
      if (protocol::has_reached(seen, wanted)) return true;
      if (ptx::load_acquire_gpu(&state_->gave_up) != 0) return false;
      const std::uint64_t now = ptx::global_time_ns();
      if (begin == 0) begin = now;
      if (now - begin <= limit_ns_) continue;
      state_->seen = seen;
      state_->wanted = wanted;
      ptx::store_release_gpu(&state_->gave_up, 1);
      return false;
    }
  }

  GridBarrierState* state_;
  std::uint64_t limit_ns_;
  std::uint32_t round_ = 0;
};

}  // namespace moewave::sm90
