// The token order: one sequence over all ranks' tokens, seen from one rank. It interleaves the ranks in blocks of
// kOrderBlockTokens tokens and starts at the rank after the reader, so that all links carry load from the first row to
// the last and no two readers start at the same peer. Ranks that have run out of tokens are left out of later rounds.
//
// Round j holds block j (tokens j * kOrderBlockTokens and following) of every rank that has one; within a round the
// ranks follow in cyclic order from (reader + 1) % ranks, the reader's own block last.
#pragma once

#include <cstdint>

#include "protocol/tile_shape.h"

namespace moewave::protocol {

MOEWAVE_HD constexpr std::int32_t blocks_of_tokens(std::int32_t tokens) {
  return static_cast<std::int32_t>(ceil_div(tokens, kOrderBlockTokens));
}

/// Place of block `block` of rank `source` in the order that rank `reader` uses. O(ranks).
MOEWAVE_HD inline std::int32_t order_of_block(const std::int32_t* tokens_per_rank, int ranks, int reader, int source,
                                              std::int32_t block) {
  std::int32_t place = 0;
  const int turn = (source - reader - 1 + ranks) % ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int32_t blocks = blocks_of_tokens(tokens_per_rank[rank]);
    const bool earlier_turn = (rank - reader - 1 + ranks) % ranks < turn;
    place += static_cast<std::int32_t>(min64(blocks, block + (earlier_turn ? 1 : 0)));
  }
  return place;
}

/// All ranks' blocks, in the plain numbering (rank 0's blocks, then rank 1's, ...), for handing them to workers.
struct SourceBlock {
  int rank = 0;
  std::int32_t block = 0;
};

MOEWAVE_HD inline std::int32_t total_blocks(const std::int32_t* tokens_per_rank, int ranks) {
  std::int32_t sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += blocks_of_tokens(tokens_per_rank[rank]);
  return sum;
}

MOEWAVE_HD inline SourceBlock source_block(const std::int32_t* tokens_per_rank, std::int32_t number) {
  SourceBlock result{0, number};
  while (result.block >= blocks_of_tokens(tokens_per_rank[result.rank])) {
    result.block -= blocks_of_tokens(tokens_per_rank[result.rank]);
    ++result.rank;
  }
  return result;
}

}  // namespace moewave::protocol
