// Integer atomics inside one rank's memory that the schedule needs; relaxed, ordered by the barrier between phases.
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

#if !defined(__CUDA_ARCH__)
#include <atomic>
#endif

namespace moewave::protocol {

MOEWAVE_HD inline void atomic_add(std::int32_t* target, std::int32_t value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(target, value);
#else
  std::atomic_ref<std::int32_t>(*target).fetch_add(value, std::memory_order_relaxed);
#endif
}

MOEWAVE_HD inline void atomic_min(std::int64_t* target, std::int64_t value) {
#if defined(__CUDA_ARCH__)
  atomicMin(reinterpret_cast<long long*>(target), static_cast<long long>(value));
#else
  std::atomic_ref<std::int64_t> shared(*target);
  std::int64_t seen = shared.load(std::memory_order_relaxed);
  while (value < seen && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
#endif
}

}  // namespace moewave::protocol
