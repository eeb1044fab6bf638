#include "layer/call_report.h"

namespace moewave {
namespace {

void count_rows(const ReportSource& source, RankStats& stats, CallReport* report) {
  const protocol::Geometry& geometry = source.geometry;
  const protocol::Schedule& schedule = source.schedule;
  const std::int64_t row_bytes = geometry.hidden * 2 * (source.backward ? 2 : 1);  // backward pulls x and dout
  const std::int64_t push_bytes = geometry.hidden * 2;
  const std::int32_t first = protocol::first_expert(geometry.experts, geometry.ranks, source.rank);
  const std::size_t matrix_row = static_cast<std::size_t>(source.rank) * static_cast<std::size_t>(geometry.ranks);
  for (std::int32_t tile = 0; tile < schedule.totals->tiles; ++tile) {
    const protocol::Tile& info = schedule.tiles[tile];
    if (report != nullptr)
      report->expert_rows[static_cast<std::size_t>(first) + static_cast<std::size_t>(info.expert)] += info.rows;
    for (int i = 0; i < info.rows; ++i) {
      const int owner = schedule.row_route[std::int64_t{tile} * protocol::kTileRows + i].rank;
      if (owner == source.rank) continue;
      stats.per_route_bytes += row_bytes;
      stats.pushed_bytes += push_bytes;
      if (report != nullptr) report->pushed_bytes[matrix_row + static_cast<std::size_t>(owner)] += push_bytes;
    }
  }
  for (std::int32_t pull = 0; pull < schedule.totals->pulls; ++pull) {
    stats.pulled_bytes += row_bytes;
    if (report == nullptr) continue;
    report->pulled_bytes[matrix_row + static_cast<std::size_t>(schedule.pull_source[pull].rank)] += row_bytes;
  }
}

}  // namespace

CallReport empty_call_report(const protocol::Geometry& geometry, bool backward) {
  const std::size_t pairs = static_cast<std::size_t>(geometry.ranks) * static_cast<std::size_t>(geometry.ranks);
  return {backward,
          {},
          std::vector<std::int64_t>(pairs),
          std::vector<std::int64_t>(pairs),
          std::vector<std::int64_t>(static_cast<std::size_t>(geometry.experts))};
}

RankStats describe_rank(const ReportSource& source, CallReport* report) {
  RankStats stats;
  const protocol::ScheduleTotals& totals = *source.schedule.totals;
  stats.tokens = source.tokens;
  for (std::int64_t route = 0; route < source.tokens * source.geometry.topk; ++route) {
    stats.routes += source.ids[route] >= 0 && source.ids[route] < source.geometry.experts ? 1 : 0;
  }
  stats.rows = totals.rows;
  stats.padded_rows = std::int64_t{totals.tiles} * protocol::kTileRows;
  stats.pulled_tokens = totals.pulls;
  stats.macrobatches = totals.macrobatches;
  stats.minibatches = totals.minibatches;
  count_rows(source, stats, report);
  return stats;
}

}  // namespace moewave
