// What forward and backward tasks share: waiting for tokens, gathering rows, weights of an expert.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "cpu/sm.h"
#include "protocol/tasks.h"

namespace moewave::cpu {

using RowPointers = std::array<const Bf16*, kProductRows>;

inline float clamp_bound(const std::optional<float>& clamp) {
  return clamp ? *clamp : std::numeric_limits<float>::infinity();
}

/// Columns [begin, begin + count) of a matrix that is `width` wide.
struct ColumnBlock {
  std::int64_t begin;
  int count;
};

inline ColumnBlock column_block(std::int32_t number, int block, std::int64_t width) {
  const std::int64_t begin = std::int64_t{number} * block;
  return {begin, static_cast<int>(std::min<std::int64_t>(block, width - begin))};
}

/// Waits until every pull up to and including `minibatch` is done: its rows may use tokens that were first pulled for
/// an earlier one. Own tokens need this rank's x.
void wait_for_tokens(Sm& sm, std::int32_t minibatch);
void wait_for_own_x(Sm& sm);

/// Pointers to the valid rows of a tile in the ring or among the rank's own staged tokens.
void gather_rows(const Sm& sm, std::int64_t first_row, int rows, const protocol::Place<Bf16>& staged,
                 const protocol::Place<Bf16>& ring, const Bf16** pointers);

/// Rows `first_row`... of a plain matrix.
inline void matrix_rows(const Bf16* matrix, std::int64_t width, std::int64_t first_row, int rows,
                        const Bf16** pointers) {
  for (int i = 0; i < rows; ++i) pointers[i] = matrix + (first_row + i) * width;
}

/// The rank's own tokens of a shared-expert tile.
inline int own_tile_rows(const Sm& sm, std::int32_t tile) {
  return static_cast<int>(
      std::min<std::int64_t>(protocol::kTileRows, sm.call->tokens - std::int64_t{tile} * protocol::kTileRows));
}

/// g and u of one column block: rounded sums of x Wg^T and x Wu^T, side by side in the product (gate first).
void multiply_gate_up(Sm& sm, const RowPointers& x_rows, int rows, const Bf16* gate, const Bf16* up, ColumnBlock block);

/// Where g and u of row `row` are kept: in the context, or recomputed in the workspace.
struct PreActivations {
  Bf16* gate;
  Bf16* up;
};
PreActivations saved_row(const Sm& sm, std::int64_t row);
PreActivations recomputed_row(const Sm& sm, std::int32_t macrobatch, std::int64_t row);
PreActivations shared_row(const Sm& sm, std::int64_t token);

/// Row `row` of the table in its segment of the gradient row buffers.
std::int64_t segment_row(const Sm& sm, std::int32_t macrobatch, std::int64_t row);

}  // namespace moewave::cpu
