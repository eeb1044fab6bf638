// What ranks tell each other when a call begins, and how epochs are compared.
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

namespace moewave::protocol {

/// A rank's card for one call, written into every peer's memory before its flag for ids is raised. All ranks see the
/// same cards and so come to the same verdict.
struct EntryHeader {
  std::uint32_t epoch;
  std::uint32_t direction;  // Direction
  std::uint32_t refused;    // 1: this rank's call has more tokens than the layer was made for
  std::uint32_t dtype;
  std::int64_t tokens;
  std::int64_t topk;
  std::uint64_t configuration;  // hash of shape and geometry
};

enum Direction : std::uint32_t { kForward = 0, kBackward = 1 };

enum class EntryVerdict { kGo, kRefused, kMismatch };

/// The verdict on all ranks' headers, and the first rank it is about.
struct EntryDecision {
  EntryVerdict verdict;
  int rank;
};

MOEWAVE_HD inline EntryDecision judge_entry(const EntryHeader* headers, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (headers[rank].refused != 0) return {EntryVerdict::kRefused, rank};
  }
  for (int rank = 1; rank < ranks; ++rank) {
    const EntryHeader& a = headers[0];
    const EntryHeader& b = headers[rank];
    if (a.epoch != b.epoch || a.direction != b.direction || a.dtype != b.dtype || a.topk != b.topk ||
        a.configuration != b.configuration) {
      return {EntryVerdict::kMismatch, rank};
    }
  }
  return {EntryVerdict::kGo, -1};
}

/// Flags and counters only grow, modulo 2^32: has `seen` reached `wanted`?
MOEWAVE_HD constexpr bool has_reached(std::uint32_t seen, std::uint32_t wanted) {
  return static_cast<std::int32_t>(seen - wanted) >= 0;
}

}  // namespace moewave::protocol
