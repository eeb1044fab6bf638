// SwiGLU on pairs of BF16 numbers, with the GPU's fast exponential and reciprocal (relative error below 2^-20, where h
// is rounded to 2^-9). Forward and backward use this one function, so that saved and recomputed h agree bit for bit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "math/swiglu.h"

namespace moewave::sm90 {

__device__ __forceinline__ float low_half(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Rounds two numbers to nearest even: `low` in the lower half.
__device__ __forceinline__ std::uint32_t round_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ __forceinline__ std::uint32_t join(Bf16 low, Bf16 high) {
  return std::uint32_t{low.bits} | std::uint32_t{high.bits} << 16;
}

__device__ __forceinline__ float silu(float gate) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + __expf(-gate)));
  return gate * reciprocal;
}

/// h of two columns from the rounded g and u. A clamp that is off is infinity.
__device__ __forceinline__ std::uint32_t swiglu_pair(std::uint32_t gate, std::uint32_t up, float clamp) {
  const float low = silu(math::clamp_gate(low_half(gate), clamp)) * math::clamp_linear(low_half(up), clamp);
  const float high = silu(math::clamp_gate(high_half(gate), clamp)) * math::clamp_linear(high_half(up), clamp);
  return round_pair(low, high);
}

}  // namespace moewave::sm90
