// Builds schedules for tests: a described configuration, memory of exactly the documented sizes, one or several
// workers, and the first difference between two schedules.
#pragma once

#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "plan/planner.h"
#include "protocol/schedule.h"
#include "protocol/tasks.h"

namespace moewave::test {

enum class Routing { kUniform, kFewExperts, kSingleExpert, kMasked, kRepeated, kOutOfRange, kNothing };
inline constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kFewExperts, Routing::kSingleExpert,
                                        Routing::kMasked,  Routing::kRepeated,   Routing::kOutOfRange,
                                        Routing::kNothing};

/// All ranks' ids; [rank][token * topk + slot].
using AllIds = std::vector<std::vector<std::int32_t>>;

inline std::int32_t draw_id(Routing routing, std::int32_t experts, std::mt19937& random) {
  const auto below = [&](std::int32_t bound) { return static_cast<std::int32_t>(random() % bound); };
  switch (routing) {
    case Routing::kFewExperts:
      return below(experts < 3 ? experts : 3);
    case Routing::kSingleExpert:
      return experts / 2;
    case Routing::kMasked:
      return below(10) < 7 ? -1 : below(experts);
    case Routing::kOutOfRange:
      return below(50) == 0 ? (below(2) == 0 ? experts + below(1'000'000) : -2 - below(1'000'000)) : below(experts);
    case Routing::kNothing:
      return -1;
    default:
      return below(experts);
  }
}

inline AllIds draw_ids(Routing routing, const std::vector<std::int32_t>& tokens_per_rank, std::int32_t experts,
                       std::int32_t topk, std::uint32_t seed) {
  std::mt19937 random(seed);
  AllIds ids;
  for (const std::int32_t tokens : tokens_per_rank) {
    std::vector<std::int32_t>& of_rank = ids.emplace_back();
    for (std::int64_t route = 0; route < std::int64_t{tokens} * topk; ++route) {
      const bool repeats = routing == Routing::kRepeated && route % topk != 0 && random() % 2 == 0;
      of_rank.push_back(repeats ? of_rank.back() : draw_id(routing, experts, random));
    }
  }
  return ids;
}

/// Everything that a schedule follows from.
struct ScheduleCase {
  protocol::Geometry geometry;
  int rank = 0;
  std::vector<std::int32_t> tokens_per_rank;
  AllIds ids;
};

inline std::ostream& operator<<(std::ostream& out, const ScheduleCase& c) {
  const protocol::Geometry& g = c.geometry;
  out << "rank " << c.rank << " of " << g.ranks << ", E " << g.experts << ", k " << g.topk << ", tokens";
  for (const std::int32_t tokens : c.tokens_per_rank) out << ' ' << tokens;
  return out << " (max " << g.max_tokens << "), minibatch " << g.minibatch_tiles << " tiles, " << g.segments
             << " segments of " << g.segment_tokens << " tokens and " << g.segment_rows << " rows, saved "
             << g.saved_rows;
}

/// Results and scratch of one build, each array as long as schedule.h says and no longer.
class BuiltSchedule {
 public:
  explicit BuiltSchedule(const ScheduleCase& c) : geometry_(c.geometry), rank_(c.rank), tokens_(c.tokens_per_rank) {
    const protocol::Geometry& g = geometry_;
    const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
    macrobatches_.resize(size(g.max_macrobatches() + 1));
    minibatches_.resize(size(g.max_minibatches() + 1));
    tiles_.resize(size(g.max_tiles()));
    groups_.resize(size(g.max_groups() + g.max_local_experts()));
    row_source_.assign(size(g.max_tiles() * protocol::kTileRows), kUnwritten);
    row_route_.assign(size(g.max_tiles() * protocol::kTileRows), {kUnwritten, kUnwritten});
    pull_source_.resize(size(g.max_remote_tokens()));
    local_expert_.resize(size(g.max_valid_rows()));
    block_rows_.resize(size(g.max_blocks() * g.max_local_experts()));
    block_pulls_.resize(size(g.max_blocks() * g.max_local_experts()));
    block_load_.resize(size(g.max_blocks()));
    for (auto* of_groups : {&group_rows_, &group_pulls_, &group_tile_, &group_pull_}) {
      of_groups->resize(size(g.max_groups()));
    }
    last_group_.resize(size(g.max_local_experts()));
    totals_.bad_route = protocol::kNoBadRoute;
  }
  BuiltSchedule(const BuiltSchedule&) = delete;
  BuiltSchedule& operator=(const BuiltSchedule&) = delete;

  static constexpr std::int32_t kUnwritten = INT32_MIN;

  protocol::Schedule view() {
    return {&totals_,       macrobatches_.data(), minibatches_.data(), tiles_.data(),
            groups_.data(), row_source_.data(),   row_route_.data(),   pull_source_.data()};
  }

  protocol::ScheduleTask task() {
    return {geometry_,
            rank_,
            tokens_.data(),
            view(),
            {local_expert_.data(), block_rows_.data(), block_pulls_.data(), block_load_.data(), group_rows_.data(),
             group_pulls_.data(), group_tile_.data(), group_pull_.data(), last_group_.data()}};
  }

  /// Every worker is a thread; they meet at a barrier after each phase.
  void build(const AllIds& ids, int workers);

 private:
  protocol::Geometry geometry_;
  int rank_;
  std::vector<std::int32_t> tokens_;
  protocol::ScheduleTotals totals_{};
  std::vector<protocol::Macrobatch> macrobatches_;
  std::vector<protocol::Minibatch> minibatches_;
  std::vector<protocol::Tile> tiles_;
  std::vector<protocol::WgradGroup> groups_;
  std::vector<std::int32_t> row_source_;
  std::vector<protocol::RouteRef> row_route_;
  std::vector<protocol::TokenRef> pull_source_;
  std::vector<std::int16_t> local_expert_;
  std::vector<std::int32_t> block_rows_, block_pulls_;
  std::vector<protocol::BlockLoad> block_load_;
  std::vector<std::int32_t> group_rows_, group_pulls_, group_tile_, group_pull_, last_group_;
};

// ---- comparison, field by field: padding bytes of the structs mean nothing

inline std::vector<std::int64_t> fields(const protocol::ScheduleTotals& t) {
  return {t.macrobatches, t.minibatches, t.tiles, t.pulls, t.groups, t.rows, t.bad_route};
}
inline std::vector<std::int64_t> fields(const protocol::Macrobatch& m) {
  return {m.block_begin, m.tile_begin, m.pull_begin, m.minibatch_begin};
}
inline std::vector<std::int64_t> fields(const protocol::Minibatch& q) {
  return {q.tile_begin, q.pull_begin, q.group_begin, q.macrobatch};
}
inline std::vector<std::int64_t> fields(const protocol::Tile& t) {
  return {t.expert, t.rows, t.macrobatch, t.minibatch};
}
inline std::vector<std::int64_t> fields(const protocol::WgradGroup& g) {
  return {g.expert, g.tile_begin, g.tile_end, g.macrobatch, g.previous, g.is_last ? 1 : 0};
}
inline std::vector<std::int64_t> fields(const protocol::TokenRef& t) { return {t.rank, t.token}; }
inline std::vector<std::int64_t> fields(const protocol::RouteRef& r) { return {r.rank, r.route}; }
inline std::vector<std::int64_t> fields(std::int32_t value) { return {value}; }

template <typename T>
std::string difference(const char* name, const T* a, const T* b, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<std::int64_t> left = fields(a[i]);
    const std::vector<std::int64_t> right = fields(b[i]);
    if (left == right) continue;
    std::ostringstream text;
    text << name << '[' << i << "]:";
    for (const std::int64_t value : left) text << ' ' << value;
    text << " against";
    for (const std::int64_t value : right) text << ' ' << value;
    return text.str();
  }
  return "";
}

/// The first difference between two schedules, empty if there is none. Rows that no token fills are compared too: both
/// must have been left as they were.
inline std::string first_difference(const protocol::Schedule& a, const protocol::Schedule& b) {
  std::string found = difference("totals", a.totals, b.totals, 1);
  const protocol::ScheduleTotals& totals = *a.totals;
  const std::int64_t rows = std::int64_t{totals.tiles} * protocol::kTileRows;
  if (found.empty()) found = difference("macrobatches", a.macrobatches, b.macrobatches, totals.macrobatches + 1);
  if (found.empty()) found = difference("minibatches", a.minibatches, b.minibatches, totals.minibatches + 1);
  if (found.empty()) found = difference("tiles", a.tiles, b.tiles, totals.tiles);
  if (found.empty()) found = difference("groups", a.groups, b.groups, totals.groups);
  if (found.empty()) found = difference("row_source", a.row_source, b.row_source, rows);
  if (found.empty()) found = difference("row_route", a.row_route, b.row_route, rows);
  if (found.empty()) found = difference("pull_source", a.pull_source, b.pull_source, totals.pulls);
  return found;
}

}  // namespace moewave::test
