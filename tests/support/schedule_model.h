// What a schedule must be, written down without counting sort, blocks of counters or workers: one list of rows, sorted.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "support/schedule_builder.h"

namespace moewave::test {

struct ModelToken {
  std::int32_t rank;
  std::int32_t token;
  std::int32_t place;  // in the token order, token by token
  std::int32_t block;  // likewise, block by block
};

/// The token order as the header of token_order.h words it: round by round, the ranks in cyclic order from the one
/// after the reader.
inline std::vector<ModelToken> model_token_order(const std::vector<std::int32_t>& tokens_per_rank, int reader) {
  const int ranks = static_cast<int>(tokens_per_rank.size());
  const std::int32_t most = *std::max_element(tokens_per_rank.begin(), tokens_per_rank.end());
  std::vector<ModelToken> order;
  std::int32_t block = 0;
  for (std::int32_t first = 0; first < most; first += protocol::kOrderBlockTokens) {
    for (int turn = 1; turn <= ranks; ++turn) {
      const int rank = (reader + turn) % ranks;
      const std::int32_t end =
          std::min(first + protocol::kOrderBlockTokens, tokens_per_rank[static_cast<std::size_t>(rank)]);
      if (first >= end) continue;
      for (std::int32_t token = first; token < end; ++token) {
        order.push_back({rank, token, static_cast<std::int32_t>(order.size()), block});
      }
      ++block;
    }
  }
  return order;
}

struct ModelRow {
  std::int32_t macrobatch;
  std::int32_t expert;  // local number
  ModelToken token;
  std::int32_t slot;
};

class ModelSchedule {
 public:
  explicit ModelSchedule(const ScheduleCase& c) : case_(c), geometry_(c.geometry) {
    order_ = model_token_order(c.tokens_per_rank, c.rank);
    first_expert_ = 0;
    for (int rank = 0; rank < c.rank; ++rank) first_expert_ += experts_of(rank);
    find_bad_route();
    collect_rows();
    cut();
    std::stable_sort(rows_.begin(), rows_.end(), [](const ModelRow& a, const ModelRow& b) {
      return std::tie(a.macrobatch, a.expert, a.token.place, a.slot) <
             std::tie(b.macrobatch, b.expert, b.token.place, b.slot);
    });
    lay_out_tiles();
    number_pulls();
    cut_minibatches();
    collect_groups();
    totals.rows = static_cast<std::int64_t>(rows_.size());
  }

  protocol::Schedule view() {
    return {&totals,       macrobatches.data(), minibatches.data(), tiles.data(),
            groups.data(), row_source.data(),   row_route.data(),   pull_source.data()};
  }

  protocol::ScheduleTotals totals{};
  std::vector<protocol::Macrobatch> macrobatches;
  std::vector<protocol::Minibatch> minibatches;
  std::vector<protocol::Tile> tiles;
  std::vector<protocol::WgradGroup> groups;
  std::vector<std::int32_t> row_source;
  std::vector<protocol::RouteRef> row_route;
  std::vector<protocol::TokenRef> pull_source;

 private:
  std::int32_t experts_of(int rank) const {
    const std::int32_t spread = geometry_.experts - geometry_.experts / geometry_.ranks * geometry_.ranks;
    return geometry_.experts / geometry_.ranks + (rank < spread ? 1 : 0);
  }
  std::int32_t id_of(int rank, std::int32_t token, std::int32_t slot) const {
    return case_.ids[static_cast<std::size_t>(rank)][static_cast<std::size_t>(token * geometry_.topk + slot)];
  }

  void find_bad_route() {
    totals.bad_route = protocol::kNoBadRoute;
    for (int rank = geometry_.ranks - 1; rank >= 0; --rank) {
      const auto& ids = case_.ids[static_cast<std::size_t>(rank)];
      for (std::size_t route = ids.size(); route-- > 0;) {
        if (ids[route] >= -1 && ids[route] < geometry_.experts) continue;
        totals.bad_route = rank * geometry_.max_tokens * geometry_.topk + static_cast<std::int64_t>(route);
      }
    }
  }

  void collect_rows() {
    for (const ModelToken& token : order_) {
      for (std::int32_t slot = 0; slot < geometry_.topk; ++slot) {
        const std::int64_t expert = std::int64_t{id_of(token.rank, token.token, slot)} - first_expert_;
        if (expert < 0 || expert >= experts_of(case_.rank)) continue;
        rows_.push_back({0, static_cast<std::int32_t>(expert), token, slot});
      }
    }
  }

  // Greedy, block by block: what the block's tokens and rows would make of the open macrobatch decides.
  void cut() {
    const std::int32_t blocks = order_.empty() ? 0 : order_.back().block + 1;
    std::vector<std::map<std::int32_t, bool>> remote(static_cast<std::size_t>(blocks));
    std::vector<std::int64_t> rows(static_cast<std::size_t>(blocks));
    for (const ModelRow& row : rows_) {
      const std::size_t block = static_cast<std::size_t>(row.token.block);
      ++rows[block];
      if (row.token.rank != case_.rank) remote[block][row.token.token] = true;
    }
    std::vector<std::int32_t> macrobatch_of(static_cast<std::size_t>(blocks));
    macrobatches.push_back({0, 0, 0, 0});
    std::int64_t open_tokens = 0;
    std::int64_t open_rows = 0;
    for (std::size_t block = 0; block < macrobatch_of.size(); ++block) {
      const std::int64_t tokens = static_cast<std::int64_t>(remote[block].size());
      if (open_tokens + tokens > geometry_.segment_tokens || open_rows + rows[block] > geometry_.segment_rows) {
        macrobatches.push_back({static_cast<std::int32_t>(block), 0, 0, 0});
        open_tokens = open_rows = 0;
      }
      open_tokens += tokens;
      open_rows += rows[block];
      macrobatch_of[block] = static_cast<std::int32_t>(macrobatches.size()) - 1;
    }
    totals.macrobatches = static_cast<std::int32_t>(macrobatches.size());
    macrobatches.push_back({blocks, 0, 0, 0});
    for (ModelRow& row : rows_) row.macrobatch = macrobatch_of[static_cast<std::size_t>(row.token.block)];
  }

  void lay_out_tiles() {
    for (const ModelRow& row : rows_) {
      const bool same_group =
          !tiles.empty() && tiles.back().macrobatch == row.macrobatch && tiles.back().expert == row.expert;
      if (!same_group || tiles.back().rows == protocol::kTileRows) {
        tiles.push_back({row.expert, 0, row.macrobatch, -1});
        row_source.resize(tiles.size() * protocol::kTileRows, BuiltSchedule::kUnwritten);
        row_route.resize(tiles.size() * protocol::kTileRows, {BuiltSchedule::kUnwritten, BuiltSchedule::kUnwritten});
      }
      row_number_.push_back((tiles.size() - 1) * protocol::kTileRows + static_cast<std::size_t>(tiles.back().rows));
      row_route[row_number_.back()] = {row.token.rank, row.token.token * geometry_.topk + row.slot};
      ++tiles.back().rows;
    }
    totals.tiles = static_cast<std::int32_t>(tiles.size());
    for (std::int32_t m = 0; m <= totals.macrobatches; ++m) {
      macrobatches[static_cast<std::size_t>(m)].tile_begin = static_cast<std::int32_t>(
          std::count_if(tiles.begin(), tiles.end(), [&](const protocol::Tile& tile) { return tile.macrobatch < m; }));
    }
  }

  void number_pulls() {
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> position;  // in the ring, by rank and token
    std::vector<std::int32_t> used(macrobatches.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const ModelRow& row = rows_[i];
      if (row.token.rank == case_.rank) {
        row_source[row_number_[i]] = -1 - row.token.token;
        continue;
      }
      const auto [found, is_new] = position.try_emplace({row.token.rank, row.token.token}, 0);
      if (is_new) {
        const std::int64_t segment = row.macrobatch % geometry_.segments;
        found->second = static_cast<std::int32_t>(segment * geometry_.segment_tokens +
                                                  used[static_cast<std::size_t>(row.macrobatch)]++);
        pull_source.push_back({row.token.rank, row.token.token});
        first_use_tile_.push_back(static_cast<std::int32_t>(row_number_[i] / protocol::kTileRows));
      }
      row_source[row_number_[i]] = found->second;
    }
    totals.pulls = static_cast<std::int32_t>(pull_source.size());
    std::int32_t before = 0;
    for (std::size_t m = 0; m < macrobatches.size(); ++m) {
      macrobatches[m].pull_begin = before;
      before += used[m];
    }
  }

  void cut_minibatches() {
    for (std::int32_t m = 0; m < totals.macrobatches; ++m) {
      protocol::Macrobatch& macrobatch = macrobatches[static_cast<std::size_t>(m)];
      const std::int32_t end = macrobatches[static_cast<std::size_t>(m) + 1].tile_begin;
      macrobatch.minibatch_begin = static_cast<std::int32_t>(minibatches.size());
      std::int32_t tile = macrobatch.tile_begin;
      while (tile < end) {
        minibatches.push_back({tile, 0, 0, m});
        for (std::int32_t i = 0; i < geometry_.minibatch_tiles && tile < end; ++i, ++tile) {
          tiles[static_cast<std::size_t>(tile)].minibatch = static_cast<std::int32_t>(minibatches.size()) - 1;
        }
      }
      const std::size_t at_least =
          static_cast<std::size_t>(macrobatch.minibatch_begin + (geometry_.segments == 1 ? 1 : 2));
      while (minibatches.size() < at_least) minibatches.push_back({end, 0, 0, m});
    }
    totals.minibatches = static_cast<std::int32_t>(minibatches.size());
    macrobatches.back().minibatch_begin = totals.minibatches;
    minibatches.push_back({totals.tiles, 0, 0, totals.macrobatches});
    for (protocol::Minibatch& minibatch : minibatches) {
      minibatch.pull_begin =
          static_cast<std::int32_t>(std::count_if(first_use_tile_.begin(), first_use_tile_.end(),
                                                  [&](std::int32_t tile) { return tile < minibatch.tile_begin; }));
    }
  }

  void collect_groups() {
    std::vector<std::int32_t> last(static_cast<std::size_t>(experts_of(case_.rank)), -1);
    for (std::int32_t tile = 0; tile < totals.tiles; ++tile) {
      const protocol::Tile& t = tiles[static_cast<std::size_t>(tile)];
      if (!groups.empty() && groups.back().macrobatch == t.macrobatch && groups.back().expert == t.expert) {
        ++groups.back().tile_end;
        continue;
      }
      std::int32_t& before = last[static_cast<std::size_t>(t.expert)];
      const std::int32_t previous = before < 0 ? -1 : groups[static_cast<std::size_t>(before)].macrobatch;
      if (before >= 0) groups[static_cast<std::size_t>(before)].is_last = false;
      before = static_cast<std::int32_t>(groups.size());
      groups.push_back({t.expert, tile, tile + 1, t.macrobatch, previous, true});
    }
    for (protocol::Minibatch& minibatch : minibatches) {
      minibatch.group_begin =
          static_cast<std::int32_t>(std::count_if(groups.begin(), groups.end(), [&](const protocol::WgradGroup& group) {
            return group.tile_end <= minibatch.tile_begin;
          }));
    }
    for (std::size_t expert = 0; expert < last.size(); ++expert) {
      if (last[expert] >= 0) continue;
      groups.push_back(
          {static_cast<std::int32_t>(expert), totals.tiles, totals.tiles, totals.macrobatches - 1, -1, true});
    }
    totals.groups = static_cast<std::int32_t>(groups.size());
    minibatches.back().group_begin = totals.groups;
  }

  const ScheduleCase& case_;
  protocol::Geometry geometry_;
  std::vector<ModelToken> order_;
  std::int32_t first_expert_ = 0;
  std::vector<ModelRow> rows_;
  std::vector<std::size_t> row_number_;       // of rows_[i] in the padded tables
  std::vector<std::int32_t> first_use_tile_;  // by pull
};

}  // namespace moewave::test
