// Memory order between blocks of one GPU, time, and the end of a thread. One instruction a function; the scope is part
// of the name.
#pragma once

#include <cstdint>

namespace moewave::ptx {

/// ld.acquire.gpu: what the writer of the value had released before it is visible to this thread afterwards.
__device__ inline std::uint32_t load_acquire_gpu(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// red.release.gpu: everything this thread wrote or saw before is visible to who acquires the sum.
__device__ inline void add_release_gpu(std::uint32_t* address, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

/// st.release.gpu.
__device__ inline void store_release_gpu(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

/// %globaltimer: nanoseconds, the same clock on all SMs.
__device__ inline std::uint64_t global_time_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  return now;
}

/// exit: this thread ends here.
__device__ inline void exit_thread() { asm volatile("exit;"); }

}  // namespace moewave::ptx
