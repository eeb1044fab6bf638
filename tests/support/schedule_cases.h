// Random schedule configurations for property tests, of every kind that has its own path: any number of ranks, unequal
// and zero tokens, fewer experts than ranks, rings from the smallest to one that holds everything.
#pragma once

#include <rapidcheck.h>

#include <algorithm>

#include "support/schedule_builder.h"

namespace moewave::test {

enum class Ring { kWhole, kFewTokens, kFewRows, kFewOfBoth };

inline std::vector<std::int32_t> draw_tokens(int ranks, std::int32_t most) {
  std::vector<std::int32_t> tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    tokens.push_back(*rc::gen::weightedOneOf<std::int32_t>(
        {{1, rc::gen::just(0)}, {1, rc::gen::just(most)}, {6, rc::gen::inRange(0, most + 1)}}));
  }
  return tokens;
}

inline protocol::Geometry draw_geometry(int ranks, std::int64_t max_tokens) {
  LayerShape shape;
  shape.experts = *rc::gen::inRange(1, 41);
  shape.topk = *rc::gen::inRange(1, static_cast<int>(std::min<std::int64_t>(shape.experts, 8)) + 1);
  shape.hidden = 8 * *rc::gen::inRange(1, 80);
  shape.intermediate = 8 * *rc::gen::inRange(1, 40);
  shape.shared_intermediate = *rc::gen::element(0, 8, 264);
  const Ring ring = *rc::gen::element(Ring::kWhole, Ring::kFewTokens, Ring::kFewRows, Ring::kFewOfBoth);
  Tuning tuning;
  tuning.minibatch_rows = *rc::gen::inRange(1, 5 * protocol::kTileRows);
  if (ring == Ring::kFewTokens || ring == Ring::kFewOfBoth) tuning.ring_tokens = *rc::gen::inRange(1, 400);
  if (ring == Ring::kFewRows || ring == Ring::kFewOfBoth) tuning.ring_rows = *rc::gen::inRange(1, 2000);
  const std::int64_t saved_rows = *rc::gen::element(-1, 0, 1, 300, 1000);
  return plan::make_geometry(shape, ranks, max_tokens, plan::resolve_tuning(shape, ranks, max_tokens, tuning),
                             saved_rows);
}

/// `most_tokens`: of one rank.
inline ScheduleCase draw_case(std::int32_t most_tokens) {
  ScheduleCase c;
  const int ranks = *rc::gen::inRange(1, 10);
  const std::int32_t max_tokens = *rc::gen::inRange(0, most_tokens + 1);
  c.tokens_per_rank = draw_tokens(ranks, max_tokens);
  c.geometry = draw_geometry(ranks, max_tokens);
  c.rank = *rc::gen::inRange(0, ranks);
  const Routing routing = *rc::gen::elementOf(std::vector<Routing>(std::begin(kRoutings), std::end(kRoutings)));
  c.ids = draw_ids(routing, c.tokens_per_rank, c.geometry.experts, c.geometry.topk,
                   *rc::gen::inRange<std::uint32_t>(0, 1'000'000));
  return c;
}

}  // namespace moewave::test
