// Promises of the token order and of the partition of experts over ranks.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "protocol/partition.h"
#include "protocol/token_order.h"
#include "support/schedule_cases.h"
#include "support/schedule_model.h"

namespace moewave::test {
namespace {

using protocol::SourceBlock;

// The order of one reader: source blocks by place. Fails unless the places are a permutation.
std::vector<SourceBlock> order_of(const std::vector<std::int32_t>& tokens, int reader) {
  const int ranks = static_cast<int>(tokens.size());
  const std::int32_t blocks = protocol::total_blocks(tokens.data(), ranks);
  std::vector<SourceBlock> order(static_cast<std::size_t>(blocks), SourceBlock{-1, -1});
  for (std::int32_t number = 0; number < blocks; ++number) {
    const SourceBlock source = protocol::source_block(tokens.data(), number);
    const std::int32_t place = protocol::order_of_block(tokens.data(), ranks, reader, source.rank, source.block);
    RC_ASSERT(place >= 0 && place < blocks);
    RC_ASSERT(order[static_cast<std::size_t>(place)].rank == -1);
    order[static_cast<std::size_t>(place)] = source;
  }
  return order;
}

std::vector<std::int32_t> draw_tokens_of_ranks() { return draw_tokens(draw(1, 9), 300); }

RC_GTEST_PROP(TokenOrder, EveryTokenOfEveryRankHasExactlyOnePlace, ()) {
  const std::vector<std::int32_t> tokens = draw_tokens_of_ranks();
  std::vector<std::vector<int>> seen;
  for (const std::int32_t count : tokens) seen.emplace_back(static_cast<std::size_t>(count));
  for (const SourceBlock source : order_of(tokens, 0)) {
    std::vector<int>& of_rank = seen[static_cast<std::size_t>(source.rank)];
    const std::size_t first = static_cast<std::size_t>(source.block) * protocol::kOrderBlockTokens;
    RC_ASSERT(first < of_rank.size());
    for (std::size_t i = first; i < std::min(first + protocol::kOrderBlockTokens, of_rank.size()); ++i) ++of_rank[i];
  }
  for (const std::vector<int>& of_rank : seen) {
    for (const int count : of_rank) RC_ASSERT(count == 1);
  }
}

RC_GTEST_PROP(TokenOrder, EqualsThePlainListRoundByRound, ()) {
  const std::vector<std::int32_t> tokens = draw_tokens_of_ranks();
  const int reader = draw(0, static_cast<int>(tokens.size()) - 1);
  const std::vector<SourceBlock> order = order_of(tokens, reader);
  for (const ModelToken& token : model_token_order(tokens, reader)) {
    const SourceBlock source = order[static_cast<std::size_t>(token.block)];
    RC_ASSERT(source.rank == token.rank);
    RC_ASSERT(source.block == token.token / protocol::kOrderBlockTokens);
  }
}

TEST(TokenOrder, StartsAfterTheReaderAndEndsEachRoundWithIt) {
  const std::vector<std::int32_t> tokens(4, 3 * protocol::kOrderBlockTokens);
  for (int reader = 0; reader < 4; ++reader) {
    const std::vector<SourceBlock> order = order_of(tokens, reader);
    ASSERT_EQ(order.size(), 12u);
    for (std::size_t place = 0; place < order.size(); ++place) {
      EXPECT_EQ(order[place].rank, (reader + 1 + static_cast<int>(place)) % 4);
      EXPECT_EQ(order[place].block, static_cast<std::int32_t>(place) / 4);
    }
  }
}

TEST(TokenOrder, RanksThatRanOutAreLeftOutOfLaterRounds) {
  // Blocks: 1, 0, 3 and 2; the last block of rank 2 is not full.
  const std::vector<std::int32_t> tokens = {32, 0, 65, 64};
  const std::vector<SourceBlock> order = order_of(tokens, 0);
  const std::vector<std::pair<int, int>> expected = {{2, 0}, {3, 0}, {0, 0}, {2, 1}, {3, 1}, {2, 2}};
  ASSERT_EQ(order.size(), expected.size());
  for (std::size_t place = 0; place < order.size(); ++place) {
    EXPECT_EQ(std::pair(order[place].rank, static_cast<int>(order[place].block)), expected[place]) << place;
  }
}

RC_GTEST_PROP(TokenOrder, LoadsTheLinksEvenlyFromTheFirstBlockToTheLast, ()) {
  const int ranks = draw(1, 9);
  const std::vector<std::int32_t> tokens(static_cast<std::size_t>(ranks), draw(0, 399));
  std::vector<int> taken(static_cast<std::size_t>(ranks));
  for (const SourceBlock source : order_of(tokens, draw(0, ranks - 1))) {
    ++taken[static_cast<std::size_t>(source.rank)];
    const auto [least, most] = std::minmax_element(taken.begin(), taken.end());
    RC_ASSERT(*most - *least <= 1);
  }
}

// ---- Partition

RC_GTEST_PROP(Partition, RangesCoverAllExpertsOnceAndTheOwnerIsTheirInverse, ()) {
  const std::int32_t experts = draw(1, 4096);
  const int ranks = draw(1, *rc::gen::element(16, 1024));
  std::int32_t next = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int32_t count = protocol::expert_count(experts, ranks, rank);
    RC_ASSERT(protocol::first_expert(experts, ranks, rank) == next);
    RC_ASSERT(count == experts / ranks + (rank < experts % ranks ? 1 : 0));
    RC_ASSERT(count <= protocol::max_expert_count(experts, ranks));
    for (std::int32_t i = 0; i < count; ++i) RC_ASSERT(protocol::owner_of_expert(experts, ranks, next + i) == rank);
    next += count;
  }
  RC_ASSERT(next == experts);
}

RC_GTEST_PROP(Partition, ThePublicRangesAreTheSame, ()) {
  const std::int32_t experts = draw(1, 4096);
  const int ranks = draw(1, 99);
  for (int rank = 0; rank < ranks; ++rank) {
    const ExpertRange range = local_experts(experts, ranks, rank);
    RC_ASSERT(range.begin == protocol::first_expert(experts, ranks, rank));
    RC_ASSERT(range.size() == protocol::expert_count(experts, ranks, rank));
  }
}

}  // namespace
}  // namespace moewave::test
