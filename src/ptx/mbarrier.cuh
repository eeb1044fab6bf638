// mbarrier: a barrier in shared memory that counts arrivals and bytes of asynchronous copies. A phase ends when both
// counts are met; waiting names the parity of the phase.
#pragma once

#include <cstdint>

namespace moewave::ptx {

using Mbarrier = std::uint64_t;

/// mbarrier.init: `arrivals` end a phase. To be followed by fence_mbarrier_init and a barrier of the block.
__device__ __forceinline__ void init_mbarrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

/// mbarrier.inval: the memory may be used for something else.
__device__ __forceinline__ void invalidate_mbarrier(std::uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

/// fence.mbarrier_init: makes initialised barriers visible to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/// mbarrier.arrive (release at block scope).
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

/// mbarrier.arrive.expect_tx: arrives and makes the phase wait for `bytes` more.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

/// cp.async.mbarrier.arrive.noinc: arrives once all cp.async that this thread has issued so far are done.
__device__ __forceinline__ void arrive_after_async_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(barrier) : "memory");
}

/// mbarrier.try_wait (acquire at block scope): has the phase of this parity ended? May wait a short while.
__device__ __forceinline__ bool try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

}  // namespace moewave::ptx
