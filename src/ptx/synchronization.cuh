// Memory order between threads of one GPU and between GPUs, barriers of part of a block, time, and the end of a thread.
// One instruction a function; the scope is part of the name.
#pragma once

#include <cstdint>

namespace moewave::ptx {

// ---- Loads, stores and additions with an order

/// ld.acquire: what the writer of the value had released before it is visible to this thread afterwards.
__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ std::uint32_t load_acquire_system(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// st.release: everything this thread wrote or saw before is visible to who acquires the value.
__device__ __forceinline__ void store_release_gpu(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release_system(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

/// st.relaxed: atomic and unordered; a fence before it makes it a release.
__device__ __forceinline__ void store_relaxed_system(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

/// red.release: an addition without a result; who acquires the sum sees what this thread wrote or saw before.
__device__ __forceinline__ void add_release_gpu(std::uint32_t* address, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

/// atom.add: the value before. The relaxed one orders nothing.
__device__ __forceinline__ std::uint32_t fetch_add_relaxed_gpu(std::uint32_t* address, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ std::uint32_t fetch_add_acq_rel_gpu(std::uint32_t* address, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

/// atom.cas at system scope: the value before.
__device__ __forceinline__ std::uint32_t compare_exchange_system(std::uint32_t* address, std::uint32_t expected,
                                                                 std::uint32_t desired) {
  std::uint32_t before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(address), "r"(expected), "r"(desired)
               : "memory");
  return before;
}

// ---- Fences

__device__ __forceinline__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }

/// fence.proxy.async: orders ordinary accesses and those of bulk copies, tensor copies and wgmma, in both directions
/// and in all memories. The second one is limited to the block's shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" : : : "memory"); }
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// ---- Parts of a block

/// bar.sync: waits until `threads` threads have come to barrier `id`.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

/// setmaxnreg: this warpgroup gives registers back to its block, or waits until it gets them.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// ---- Time, identity, end

/// %globaltimer: nanoseconds, the same clock on all SMs.
__device__ __forceinline__ std::uint64_t global_time_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  return now;
}

/// %ctaid.x, read anew at every call instead of being kept in a register.
__device__ __forceinline__ std::uint32_t block_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ std::uint32_t sm_id() {
  std::uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

/// nanosleep: about that long.
__device__ __forceinline__ void sleep_ns(std::uint32_t ns) { asm volatile("nanosleep.u32 %0;" : : "r"(ns)); }

/// Ends the launch with an error, by a store to an address that does not exist. Not `trap`, which keeps ptxas from
/// giving warpgroups registers of their own.
__device__ __forceinline__ void fault() { asm volatile("st.global.u32 [%0], 0;" : : "l"(0ull) : "memory"); }

/// exit: this thread ends here.
__device__ __forceinline__ void exit_thread() { asm volatile("exit;"); }

/// The address of an object in shared memory as instructions take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* object) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(object));
}

}  // namespace moewave::ptx
