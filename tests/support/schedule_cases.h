// Random schedule configurations for property tests, of every kind that has its own path: any number of ranks, unequal
// and zero tokens, fewer experts than ranks, rings from the smallest to one that holds everything.
#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>

#include "support/schedule_builder.h"

namespace moewave::test {

/// Runs of a property where RC_PARAMS does not say otherwise; RapidCheck reads it at its first property.
inline const bool kRunsAreSet = setenv("RC_PARAMS", "max_success=400", 0) == 0;

/// Low to high, both included, at full range from the first run on: small cases come from shrinking, not from the
/// start.
template <typename T>
T draw(T low, T high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(low, high + 1));
}

enum class Ring { kWhole, kFewTokens, kFewRows, kFewOfBoth };

inline std::vector<std::int32_t> draw_tokens(int ranks, std::int32_t most) {
  std::vector<std::int32_t> tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    tokens.push_back(
        *rc::gen::weightedOneOf<std::int32_t>({{1, rc::gen::just(0)},
                                               {1, rc::gen::just(most)},
                                               {6, rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, most + 1))}}));
  }
  return tokens;
}

inline protocol::Geometry draw_geometry(int ranks, std::int64_t max_tokens) {
  LayerShape shape;
  shape.experts = draw(1, 40);
  shape.topk = draw<std::int64_t>(1, std::min<std::int64_t>(shape.experts, 8));
  shape.hidden = 8 * draw(1, 79);
  shape.intermediate = 8 * draw(1, 60);
  shape.shared_intermediate = *rc::gen::element(0, 8, 264);
  const Ring ring = *rc::gen::element(Ring::kWhole, Ring::kFewTokens, Ring::kFewRows, Ring::kFewOfBoth);
  Tuning tuning;
  tuning.minibatch_rows = draw(1, 5 * protocol::kTileRows);
  if (ring == Ring::kFewTokens || ring == Ring::kFewOfBoth) tuning.ring_tokens = draw(1, *rc::gen::element(64, 300));
  if (ring == Ring::kFewRows || ring == Ring::kFewOfBoth) tuning.ring_rows = draw(1, *rc::gen::element(300, 2000));
  const std::int64_t saved_rows = *rc::gen::element(-1, 0, 1, 300, 1000);
  protocol::Geometry geometry =
      plan::make_geometry(shape, ranks, max_tokens, plan::resolve_tuning(shape, ranks, max_tokens, tuning), saved_rows);
  geometry.interleave_tasks = draw(1, 9);
  return geometry;
}

/// `most_tokens`: of one rank.
inline ScheduleCase draw_case(std::int32_t most_tokens) {
  ScheduleCase c;
  const int ranks = draw(1, 9);
  const std::int32_t max_tokens = *rc::gen::weightedElement<std::int32_t>({{5, most_tokens}, {1, 33}, {1, 1}, {1, 0}});
  c.tokens_per_rank = draw_tokens(ranks, max_tokens);
  c.geometry = draw_geometry(ranks, max_tokens);
  c.rank = draw(0, ranks - 1);
  const Routing routing = *rc::gen::elementOf(std::vector<Routing>(std::begin(kRoutings), std::end(kRoutings)));
  c.ids = draw_ids(routing, c.tokens_per_rank, c.geometry.experts, c.geometry.topk, draw<std::uint32_t>(0, 1'000'000));
  return c;
}

}  // namespace moewave::test
