// 64-bit division without a function call on the GPU. A call anywhere in a kernel keeps ptxas from giving its roles
// registers of their own (setmaxnreg), and nvcc's 64-bit division is one.
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

namespace moewave::protocol {

/// a / b for a >= 0, b > 0. Fast where both fit 32 bits, which all but huge layers do.
MOEWAVE_HD constexpr std::int64_t quotient(std::int64_t a, std::int64_t b) {
#if defined(__CUDA_ARCH__)
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  std::uint64_t rest = 0;
  std::uint64_t result = static_cast<std::uint64_t>(a);
#pragma unroll 1
  for (int bit = 0; bit < 64; ++bit) {
    rest = rest << 1 | result >> 63;
    result <<= 1;
    if (rest >= static_cast<std::uint64_t>(b)) {
      rest -= static_cast<std::uint64_t>(b);
      result |= 1;
    }
  }
  return static_cast<std::int64_t>(result);
#else
  return a / b;
#endif
}

MOEWAVE_HD constexpr std::int64_t remainder(std::int64_t a, std::int64_t b) { return a - quotient(a, b) * b; }

}  // namespace moewave::protocol
