// Random numbers as a function of (seed, stream, index), on host and device: the same bits on both.
//
// No library distribution is used, and floating point enters only by operations that IEEE 754 rounds exactly and that
// no compiler can fuse.
#pragma once

#include <cmath>
#include <cstdint>

#include "moewave/bf16.h"
#include "moewave/host_device.h"

namespace moewave::math {

inline constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, the increment of SplitMix64

enum class RandomStream : std::uint64_t {
  kGateUp = 1,
  kDown,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kHiddenStates,
  kGradOutput,
  kLogits,
  kRoutes,
  kShuffle,
};

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well mixed bits out.
MOEWAVE_HD inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// SplitMix64 with random access: element i of a stream.
class RandomValues {
 public:
  MOEWAVE_HD RandomValues(std::uint64_t seed, RandomStream stream)
      : key_(mix(mix(seed + kGolden) + static_cast<std::uint64_t>(stream) * kGolden)) {}

  MOEWAVE_HD std::uint64_t bits(std::uint64_t i) const { return mix(key_ + (i + 1) * kGolden); }

  /// Sum of eight 16-bit uniforms, centred: an integer, close to normal, at most 4.9 standard deviations out.
  MOEWAVE_HD std::int32_t normal_integer(std::uint64_t i) const {
    constexpr std::uint64_t kEven = 0x0000ffff0000ffffu;
    const std::uint64_t a = bits(2 * i);
    const std::uint64_t b = bits(2 * i + 1);
    const std::uint64_t lanes = (a & kEven) + ((a >> 16) & kEven) + (b & kEven) + ((b >> 16) & kEven);
    return static_cast<std::int32_t>((lanes & 0xffffffffu) + (lanes >> 32)) - 4 * 0xffff;
  }

  /// About N(0, variance) with `scale` = normal_scale(variance).
  MOEWAVE_HD Bf16 normal(std::uint64_t i, float scale) const {
    return to_bf16(static_cast<float>(normal_integer(i)) * scale);
  }

 private:
  std::uint64_t key_;
};

/// 1 / the standard deviation of normal_integer: 8 uniforms of variance (2^32 - 1) / 12 each.
inline double normal_integer_scale() { return 1.0 / std::sqrt(8.0 * 4294967295.0 / 12.0); }
/// What normal() takes for values of this variance.
inline float normal_scale(double variance) { return static_cast<float>(normal_integer_scale() * std::sqrt(variance)); }

}  // namespace moewave::math
