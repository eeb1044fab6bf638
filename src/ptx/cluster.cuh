// Clusters: blocks that see each other's shared memory. Addresses of another block come from map_shared.
#pragma once

#include <cstdint>

namespace moewave::ptx {

/// %cluster_ctarank: this block's number in its cluster.
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// barrier.cluster (arrive.release, wait.acquire), by all threads of all blocks of the cluster that have not exited.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/// mapa: where the same address lies in block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t map_shared(std::uint32_t shared, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

/// st.shared::cluster: published by an arrival of the same thread.
__device__ __forceinline__ void store_cluster(std::uint32_t mapped, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" : : "r"(mapped), "r"(value) : "memory");
}

/// mbarrier.arrive (release at cluster scope) on a barrier of any block of the cluster.
__device__ __forceinline__ void arrive_cluster(std::uint32_t mapped) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(mapped) : "memory");
}

/// mbarrier.try_wait (acquire at cluster scope): also for what other blocks released.
__device__ __forceinline__ bool try_wait_cluster(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

}  // namespace moewave::ptx
