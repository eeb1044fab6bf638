// Asynchronous copies between global and shared memory. Shared addresses are those of shared_address().
#pragma once

#include <cuda.h>

#include <cstdint>

namespace moewave::ptx {

// ---- cp.async: 16 bytes a thread, ordinary (generic) proxy

/// cp.async.cg: copies 16 bytes.
__device__ __forceinline__ void copy_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared), "l"(global) : "memory");
}

/// cp.async.cg: copies the first `bytes` (0 or 16) of 16 and fills the rest with zeros. Nothing is read when 0.
__device__ __forceinline__ void copy_16_or_zero(std::uint32_t shared, const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared), "l"(global), "r"(bytes) : "memory");
}

// ---- Bulk copies: any multiple of 16 bytes, both ends 16-byte aligned, asynchronous proxy

/// cp.async.bulk, global to shared; counts its bytes on `barrier`.
__device__ __forceinline__ void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared), "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

/// cp.async.bulk, shared to global, in the thread's current group.
__device__ __forceinline__ void bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

/// cp.async.bulk.commit_group: ends the thread's current group of stores.
__device__ __forceinline__ void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }

/// cp.async.bulk.wait_group.read 0: the sources of all this thread's stores have been read.
__device__ __forceinline__ void wait_bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

/// cp.async.bulk.wait_group 0: all this thread's stores are complete and visible to it.
__device__ __forceinline__ void wait_bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }

// ---- Tensor copies: a box of a tensor described by a map; what lies outside is filled with zeros

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

/// cp.async.bulk.tensor, global to shared; counts the whole box's bytes on `barrier`.
__device__ __forceinline__ void tensor_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, int c0,
                                            int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :
               : "r"(shared), "l"(map), "r"(barrier), "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void tensor_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, int c0,
                                            int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tensor_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, int c0,
                                            int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(shared), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace moewave::ptx
