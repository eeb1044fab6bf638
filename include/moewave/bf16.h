// BF16 storage type with the one rounding rule of the library: round to nearest, ties to even; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "moewave/host_device.h"

namespace moewave {

/// A BF16 number as it lies in memory (2 bytes, the upper half of an FP32). Trivially copyable, no arithmetic.
struct Bf16 {
  std::uint16_t bits = 0;

  friend MOEWAVE_HD bool operator==(Bf16 a, Bf16 b) { return a.bits == b.bits; }
};
static_assert(sizeof(Bf16) == 2);

MOEWAVE_HD inline float to_float(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

/// Rounds to nearest even. Overflow goes to infinity; every NaN becomes a quiet NaN with its sign kept.
MOEWAVE_HD inline Bf16 to_bf16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return Bf16{static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return Bf16{static_cast<std::uint16_t>(bits >> 16)};
}

}  // namespace moewave
