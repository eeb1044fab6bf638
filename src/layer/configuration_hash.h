// What ranks compare at entry to know that they run the same layer.
#pragma once

#include <cstdint>

#include "protocol/geometry.h"

namespace moewave {

/// FNV-1a over every number that must be the same on all ranks.
constexpr std::uint64_t configuration_hash(const protocol::Geometry& g) {
  const std::int64_t values[] = {
      g.ranks,      g.experts,         g.topk,     g.hidden,         g.intermediate, g.shared_intermediate,
      g.max_tokens, g.minibatch_tiles, g.segments, g.segment_tokens, g.segment_rows, g.saved_rows};
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const std::int64_t value : values) hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3u;
  return hash;
}

}  // namespace moewave
