// Random tensors made on the GPU, where uploading them would take longer than the run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "math/random_values.h"

namespace moewave::sm90 {

/// Enqueues: to[i] = element first + i of the stream, about N(0, variance), for i in [0, count). The bits are those of
/// random_weights and random_batch.
cudaError_t launch_random_fill(Bf16* to, std::int64_t count, std::uint64_t seed, math::RandomStream values,
                               std::int64_t first, double variance, cudaStream_t stream);

}  // namespace moewave::sm90
