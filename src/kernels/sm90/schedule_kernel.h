// Builds one rank's schedule on the GPU: the protocol's own code, every warp of the grid a worker.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/schedule.h"

namespace moewave::sm90 {

/// Device memory, zero before a launch.
struct GridBarrierState {
  std::uint32_t arrived;  // blocks, all rounds together
  std::uint32_t gave_up;  // 1: a wait reached its limit; `seen` of `wanted` blocks had come
  std::uint32_t seen;
  std::uint32_t wanted;
};

/// Ends of: entry, and the six phases of build_schedule.
inline constexpr int kSchedulePhaseEnds = 7;

struct ScheduleKernelParams {
  protocol::ScheduleTask task;     // pointers to device memory
  const std::int32_t* const* ids;  // device memory, [ranks]: ids of each rank as the protocol wants them
  GridBarrierState* barrier;       // device memory; launch_schedule clears it
  std::uint64_t* phase_end_ns;     // device memory, [kSchedulePhaseEnds] %globaltimer; null: not wanted
  std::uint64_t barrier_limit_ns;
};

/// Enqueues a cooperative launch of `blocks` blocks, at most as many as the GPU holds at once (one an SM always fits).
cudaError_t launch_schedule(const ScheduleKernelParams& params, int blocks, cudaStream_t stream);

}  // namespace moewave::sm90
