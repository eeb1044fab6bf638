// The numbers that fix all sizes of a layer: shape, ranks, and how the work is cut. The same on every rank.
#pragma once

#include <cstdint>

#include "protocol/partition.h"
#include "protocol/tile_shape.h"

namespace moewave::protocol {

struct Geometry {
  int ranks = 1;
  std::int32_t experts = 0;
  std::int32_t topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t shared_intermediate = 0;
  std::int64_t max_tokens = 0;  // of one rank

  std::int32_t minibatch_tiles = 1;
  std::int32_t interleave_tasks = 1;  // tasks of one kind that follow one another where kinds are interleaved
  std::int32_t raster_tiles = 16;     // row tiles, at most, that visit the same column block one after another
  // Token copies and backward rows lie in `segments` equal parts. One segment: it holds everything and nothing is
  // reused. Two: macrobatch m lies in segment m % 2.
  int segments = 1;
  std::int64_t segment_tokens = 0;  // token copies a segment holds, a multiple of kOrderBlockTokens
  std::int64_t segment_rows = 0;    // valid rows of one macrobatch
  bool backward = true;             // memory for backward as well
  std::int64_t saved_rows = 0;      // rows whose pre-activations a context keeps, whole tiles

  MOEWAVE_HD std::int32_t max_local_experts() const { return max_expert_count(experts, ranks); }
  MOEWAVE_HD std::int64_t max_blocks() const { return ranks * ceil_div(max_tokens, kOrderBlockTokens); }
  MOEWAVE_HD std::int64_t max_remote_tokens() const { return (ranks - 1) * max_tokens; }
  MOEWAVE_HD std::int64_t max_valid_rows() const { return ranks * max_tokens * topk; }
  // Rows of one segment with every expert padded to whole tiles.
  MOEWAVE_HD std::int64_t padded_segment_rows() const {
    return round_up(min64(segment_rows, max_valid_rows()) + max_local_experts() * (kTileRows - 1), kTileRows);
  }
  // Two neighbouring macrobatches together exceed a segment in tokens or in rows (see cut_macrobatches).
  MOEWAVE_HD std::int64_t max_macrobatches() const {
    if (segments == 1) return 1;
    const std::int64_t by_tokens = segment_tokens == 0 ? 0 : max_remote_tokens() / segment_tokens;
    return min64(2 * (by_tokens + max_valid_rows() / segment_rows) + 2, max64(max_blocks(), 1));
  }
  MOEWAVE_HD std::int64_t max_groups() const { return max_macrobatches() * max_local_experts(); }
  MOEWAVE_HD std::int64_t max_tiles() const {
    return max_valid_rows() / kTileRows + min64(max_groups(), max_valid_rows());
  }
  MOEWAVE_HD std::int64_t max_forward_tasks() const {
    const std::int64_t shared_tiles = shared_intermediate > 0 ? ceil_div(max_tokens, kTileRows) : 0;
    return max_tiles() * (gate_up_blocks() + down_blocks()) +
           shared_tiles * (blocks(shared_intermediate, kGateUpColumns) + down_blocks());
  }
  MOEWAVE_HD int min_minibatches() const { return segments == 1 ? 1 : 2; }
  MOEWAVE_HD std::int64_t max_minibatches() const {
    return max_tiles() / minibatch_tiles + max_macrobatches() * (1 + min_minibatches());
  }
  // h is kept in whole column blocks of gate-up, so that a kernel's tiles of it are whole.
  MOEWAVE_HD static std::int64_t padded_width(std::int64_t width) { return round_up(width, kGateUpColumns); }
  MOEWAVE_HD std::int64_t minibatch_rows() const { return std::int64_t{minibatch_tiles} * kTileRows; }

  MOEWAVE_HD std::int32_t gate_up_blocks() const { return blocks(intermediate, kGateUpColumns); }
  MOEWAVE_HD std::int32_t down_blocks() const { return blocks(hidden, kDownColumns); }
  MOEWAVE_HD std::int32_t dh_blocks() const { return blocks(intermediate, kDhColumns); }
  MOEWAVE_HD std::int32_t dx_blocks() const { return blocks(hidden, kDxColumns); }
  // Gate, up and down alike: I in blocks of kWgradIntermediate times H in blocks of kWgradHidden.
  MOEWAVE_HD std::int32_t wgrad_blocks() const { return 3 * wgrad_blocks_of_matrix(intermediate); }
  MOEWAVE_HD std::int32_t wgrad_blocks_of_matrix(std::int64_t width) const {
    return blocks(width, kWgradIntermediate) * blocks(hidden, kWgradHidden);
  }
  MOEWAVE_HD static std::int32_t blocks(std::int64_t size, std::int64_t block) {
    return static_cast<std::int32_t>(ceil_div(size, block));
  }

  friend bool operator==(const Geometry&, const Geometry&) = default;
};

}  // namespace moewave::protocol
