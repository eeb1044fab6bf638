#include "kernels/sm90/random_fill.h"
#include "protocol/tile_shape.h"

namespace moewave::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;

__global__ void random_fill_kernel(Bf16* to, std::int64_t count, math::RandomValues random, std::int64_t first,
                                   float scale) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    to[i] = random.normal(static_cast<std::uint64_t>(first + i), scale);
  }
}

}  // namespace

cudaError_t launch_random_fill(Bf16* to, std::int64_t count, std::uint64_t seed, math::RandomStream values,
                               std::int64_t first, double variance, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(protocol::min64(protocol::ceil_div(count, kThreads), kMostBlocks));
  random_fill_kernel<<<blocks, kThreads, 0, stream>>>(to, count, math::RandomValues(seed, values), first,
                                                      math::normal_scale(variance));
  return cudaGetLastError();
}

}  // namespace moewave::sm90
