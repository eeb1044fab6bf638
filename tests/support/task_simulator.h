// Plays a rank's tasks on several workers with nothing but the counters that kernels have, and watches the memory they
// share: what a task reads must be there when it starts and still be there when it ends.
//
// The waits below are written from the header comment of tasks.h, not from the emulator.
#pragma once

#include <map>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "support/schedule_builder.h"

namespace moewave::test {

/// When the communicating SMs pull: only when nothing else can happen, whenever they may, or at any time between.
enum class Pulls { kAsLateAsAllowed, kAsEarlyAsAllowed, kAtRandom };

class TaskSimulator {
 public:
  TaskSimulator(const protocol::Geometry& geometry, const protocol::Schedule& schedule, std::int32_t own_tokens,
                bool backward)
      : g_(geometry), s_(schedule), backward_(backward), order_(geometry, schedule, own_tokens, backward) {
    own_tiles_ = protocol::Geometry::blocks(own_tokens, protocol::kTileRows);
    ring_.assign(static_cast<std::size_t>(g_.segments * g_.segment_tokens), kBeingWritten);
    for (std::int32_t q = 0; q < s_.totals->minibatches; ++q) {
      for (std::int32_t p = s_.minibatches[q].pull_begin; p < s_.minibatches[q + 1].pull_begin; ++p) {
        minibatch_of_pull_.push_back(q);
      }
    }
    for (std::int32_t m = 0; m < s_.totals->macrobatches; ++m) {
      for (std::int32_t p = s_.macrobatches[m].pull_begin; p < s_.macrobatches[m + 1].pull_begin; ++p) {
        macrobatch_of_pull_.push_back(m);
      }
    }
  }

  /// Empty if all tasks ended, otherwise what went wrong.
  std::string run(int workers, Pulls pulls, std::uint32_t seed) {
    workers_.assign(static_cast<std::size_t>(workers), {});
    random_.seed(seed);
    while (failure_.empty() && !finished()) {
      if (pulls == Pulls::kAsEarlyAsAllowed && try_pull()) continue;
      if (pulls == Pulls::kAtRandom && random_() % 2 == 0 && try_pull()) continue;
      if (try_worker(false) || try_pull() || try_worker(true)) continue;
      fail("nothing can go on");
      for (const Worker& worker : workers_) failure_ += worker.holds ? "; waits: " + name(worker.task) : "";
      failure_ += "; pulls done: " + std::to_string(pulled_) + " of " + std::to_string(s_.totals->pulls);
    }
    if (failure_.empty()) check_targets();
    return failure_;
  }

 private:
  struct Worker {
    bool holds = false;
    bool started = false;
    bool slow = false;  // ends only when nothing else can happen
    protocol::Task task{};
  };
  // Memory besides the token ring: by buffer, place and column block, whose data it holds.
  using Place = std::tuple<char, std::int64_t, std::int64_t>;
  using Kind = protocol::TaskKind;

  bool finished() const { return done_ == order_.size() && pulled_ == s_.totals->pulls; }
  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }
  static std::string name(const protocol::Task& t) {
    std::ostringstream text;
    text << "task kind " << static_cast<int>(t.kind) << " minibatch " << t.minibatch << " tile " << t.tile << " column "
         << t.column << " group " << t.group;
    return text.str();
  }

  // ---- pulls, one after another

  bool try_pull() {
    if (pulled_ == s_.totals->pulls) return false;
    const std::int32_t m = macrobatch_of_pull_[static_cast<std::size_t>(pulled_)];
    for (std::int32_t before = 0; before <= m - g_.segments; ++before) {
      if (token_reads_[before] < order_.token_readers(before)) return false;
    }
    const std::int64_t place = (m % g_.segments) * g_.segment_tokens + pulled_ - s_.macrobatches[m].pull_begin;
    ring_[static_cast<std::size_t>(place)] = pulled_;
    ++pulls_of_[minibatch_of_pull_[static_cast<std::size_t>(pulled_)]];
    ++pulled_;
    return true;
  }

  // ---- workers

  bool try_worker(bool slow_ones_too) {
    const std::size_t first = random_() % workers_.size();
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      Worker& worker = workers_[(first + i) % workers_.size()];
      if (!worker.holds && ticket_ < order_.size()) {
        worker = {true, false, random_() % 4 == 0, order_.task(ticket_)};
        ++ticket_;
        return true;
      }
      if (worker.holds && !worker.started && may_start(worker.task)) {
        worker.started = true;
        check_reads(worker.task);
        if (worker.task.kind == Kind::kWgrad) check_carried(worker.task);
        for (const auto& [place, value] : writes(worker.task)) memory_[place] = kBeingWritten;
        return true;
      }
      if (worker.holds && worker.started && (slow_ones_too || !worker.slow)) {
        check_reads(worker.task);
        for (const auto& [place, value] : writes(worker.task)) memory_[place] = value;
        count(worker.task);
        ++done_;
        worker.holds = false;
        return true;
      }
    }
    return false;
  }

  bool tokens_are_there(std::int32_t minibatch) {
    for (std::int32_t q = 0; q <= minibatch; ++q) {
      if (pulls_of_[q] < s_.minibatches[q + 1].pull_begin - s_.minibatches[q].pull_begin) return false;
    }
    return true;
  }
  bool segment_is_free(std::int32_t macrobatch, std::map<std::int32_t, std::int64_t>& reads,
                       std::int64_t (protocol::TaskOrder::*readers)(std::int32_t) const) {
    const std::int32_t before = macrobatch - g_.segments;
    return before < 0 || reads[before] >= (order_.*readers)(before);
  }

  bool may_start(const protocol::Task& t) {
    switch (t.kind) {
      case Kind::kSharedGateUp:
      case Kind::kSharedRecompute:
        return true;
      case Kind::kSharedDown:
        return shared_hidden_[t.tile] == shared_blocks(protocol::kGateUpColumns);
      case Kind::kSharedDh:
        return g_.saved_rows > 0 || shared_recomputed_[t.tile] == shared_blocks(protocol::kGateUpColumns);
      case Kind::kSharedDx:
        return shared_hidden_[t.tile] == shared_blocks(protocol::kDhColumns);
      case Kind::kSharedWgrad:
        for (std::int32_t tile = 0; tile < own_tiles_; ++tile) {
          if (shared_hidden_[tile] < shared_blocks(protocol::kDhColumns)) return false;
        }
        return true;
      case Kind::kGateUp:
        for (std::int32_t before = 0; before <= t.minibatch - protocol::kHiddenSlots; ++before) {
          if (minibatch_done_[before] < down_tasks_of(before)) return false;
        }
        return tokens_are_there(t.minibatch);
      case Kind::kDown:
        return hidden_done_[t.tile] == g_.gate_up_blocks();
      case Kind::kRecompute:
        return tokens_are_there(t.minibatch) && segment_is_free(s_.tiles[t.tile].macrobatch, recompute_reads_,
                                                                &protocol::TaskOrder::recomputed_row_readers);
      case Kind::kDh:
        if (order_.is_recomputed(t.tile) && recomputed_[t.tile] < g_.gate_up_blocks()) return false;
        return tokens_are_there(t.minibatch) &&
               segment_is_free(s_.tiles[t.tile].macrobatch, row_reads_, &protocol::TaskOrder::gradient_row_readers);
      case Kind::kDx:
        return hidden_done_[t.tile] == g_.dh_blocks();
      case Kind::kWgrad: {
        const protocol::WgradGroup& group = s_.groups[t.group];
        for (std::int32_t tile = group.tile_begin; tile < group.tile_end; ++tile) {
          if (hidden_done_[tile] < g_.dh_blocks()) return false;
        }
        return group.previous < 0 || row_reads_[group.previous] >= order_.gradient_row_readers(group.previous);
      }
    }
    return false;
  }

  void count(const protocol::Task& t) {
    switch (t.kind) {
      case Kind::kSharedGateUp:
      case Kind::kSharedDh:
        ++shared_hidden_[t.tile];
        break;
      case Kind::kSharedRecompute:
        ++shared_recomputed_[t.tile];
        break;
      case Kind::kSharedDown:
      case Kind::kSharedDx:
      case Kind::kSharedWgrad:
        break;
      case Kind::kGateUp:
        ++hidden_done_[t.tile];
        ++token_reads_[s_.tiles[t.tile].macrobatch];
        break;
      case Kind::kDown:
        ++minibatch_done_[t.minibatch];
        break;
      case Kind::kRecompute:
        ++recomputed_[t.tile];
        ++token_reads_[s_.tiles[t.tile].macrobatch];
        break;
      case Kind::kDh:
        ++hidden_done_[t.tile];
        ++token_reads_[s_.tiles[t.tile].macrobatch];
        ++recompute_reads_[s_.tiles[t.tile].macrobatch];
        break;
      case Kind::kDx:
        ++row_reads_[s_.tiles[t.tile].macrobatch];
        break;
      case Kind::kWgrad:
        ++token_reads_[s_.groups[t.group].macrobatch];
        ++row_reads_[s_.groups[t.group].macrobatch];
        break;
    }
  }

  // ---- memory

  // Tile of a segment buffer (gradient rows, recomputed rows) and of the ring of h.
  std::int64_t segment_tile(std::int32_t tile) const {
    const std::int32_t m = s_.tiles[tile].macrobatch;
    const std::int64_t place = tile - s_.macrobatches[m].tile_begin;
    const std::int64_t tiles = g_.padded_segment_rows() / protocol::kTileRows;
    return place < tiles ? (m % g_.segments) * tiles + place : -1;
  }
  std::int64_t hidden_tile(const protocol::Task& t) const {
    return (t.minibatch % protocol::kHiddenSlots) * std::int64_t{g_.minibatch_tiles} + t.tile -
           s_.minibatches[t.minibatch].tile_begin;
  }

  void expect(char buffer, std::int64_t place, std::int64_t begin, std::int64_t end, std::int64_t value,
              const protocol::Task& t) {
    for (std::int64_t column = begin; column < end; ++column) {
      const auto found = memory_.find({buffer, place, column});
      if (found != memory_.end() && found->second == value) continue;
      std::ostringstream text;
      text << name(t) << " reads buffer " << buffer << " place " << place << " column " << column << ": expected "
           << value << ", found " << (found == memory_.end() ? -2 : found->second);
      fail(text.str());
    }
  }
  void expect_tokens(std::int32_t tile, const protocol::Task& t) {
    const protocol::Tile& of = s_.tiles[tile];
    const std::int64_t segment_begin = (of.macrobatch % g_.segments) * g_.segment_tokens;
    for (std::int64_t row = std::int64_t{tile} * protocol::kTileRows; row < tile * protocol::kTileRows + of.rows;
         ++row) {
      const std::int64_t place = s_.row_source[row];
      if (place < 0) continue;
      const std::int64_t pull = s_.macrobatches[of.macrobatch].pull_begin + place - segment_begin;
      if (ring_[static_cast<std::size_t>(place)] != pull) {
        fail(name(t) + " finds another token at place " + std::to_string(place) + " of the ring");
      }
    }
  }
  // The sums that an expert carries over macrobatches: those of its group before this one, or none yet.
  void check_carried(const protocol::Task& t) {
    const protocol::WgradGroup& group = s_.groups[t.group];
    if (group.previous >= 0) {
      expect('c', group.expert, t.column, t.column + 1, group.previous, t);
    } else if (memory_.contains({'c', group.expert, t.column})) {
      fail(name(t) + " is not the first group of its expert, but says so");
    }
  }

  void check_reads(const protocol::Task& t) {
    switch (t.kind) {
      case Kind::kGateUp:
      case Kind::kRecompute:
        return expect_tokens(t.tile, t);
      case Kind::kDown:
        return expect('h', hidden_tile(t), 0, g_.gate_up_blocks(), t.tile, t);
      case Kind::kDh:
        expect_tokens(t.tile, t);
        if (order_.is_recomputed(t.tile)) expect('r', segment_tile(t.tile), 0, g_.gate_up_blocks(), t.tile, t);
        return;
      case Kind::kDx:
        return expect('g', segment_tile(t.tile), 0, g_.dh_blocks(), t.tile, t);
      case Kind::kWgrad: {
        const protocol::WgradGroup& group = s_.groups[t.group];
        for (std::int32_t tile = group.tile_begin; tile < group.tile_end; ++tile) {
          expect_tokens(tile, t);
          expect('g', segment_tile(tile), 0, g_.dh_blocks(), tile, t);
        }
        return;
      }
      default:
        return;
    }
  }

  std::vector<std::pair<Place, std::int64_t>> writes(const protocol::Task& t) {
    switch (t.kind) {
      case Kind::kGateUp:
        return {{{'h', hidden_tile(t), t.column}, t.tile}};
      case Kind::kRecompute:
        return {{{'r', segment_tile(t.tile), t.column}, t.tile}};
      case Kind::kDh:
        return {{{'g', segment_tile(t.tile), t.column}, t.tile}};
      case Kind::kWgrad:
        return {{{'c', s_.groups[t.group].expert, t.column}, s_.groups[t.group].macrobatch}};
      default:
        return {};
    }
  }

  // ---- after the end: every target is the number of tasks that there were

  void check_targets() {
    for (std::int32_t m = 0; m < s_.totals->macrobatches; ++m) {
      if (token_reads_[m] != order_.token_readers(m)) fail("token_readers of macrobatch " + std::to_string(m));
      if (!backward_) continue;
      if (row_reads_[m] != order_.gradient_row_readers(m)) fail("gradient_row_readers of " + std::to_string(m));
      if (recompute_reads_[m] != order_.recomputed_row_readers(m))
        fail("recomputed_row_readers of " + std::to_string(m));
    }
    for (std::int32_t q = 0; !backward_ && q < s_.totals->minibatches; ++q) {
      if (minibatch_done_[q] != down_tasks_of(q)) fail("down tasks of minibatch " + std::to_string(q));
    }
  }

  std::int64_t down_tasks_of(std::int32_t q) const {
    return std::int64_t{s_.minibatches[q + 1].tile_begin - s_.minibatches[q].tile_begin} * g_.down_blocks();
  }
  std::int64_t shared_blocks(std::int64_t columns) const {
    return protocol::Geometry::blocks(g_.shared_intermediate, columns);
  }

  static constexpr std::int64_t kBeingWritten = -1;

  protocol::Geometry g_;
  protocol::Schedule s_;
  bool backward_;
  protocol::TaskOrder order_;
  std::int32_t own_tiles_ = 0;
  std::vector<std::int32_t> minibatch_of_pull_, macrobatch_of_pull_;

  std::vector<Worker> workers_;
  std::mt19937 random_;
  std::int64_t ticket_ = 0;
  std::int64_t done_ = 0;
  std::int32_t pulled_ = 0;
  std::string failure_;
  std::vector<std::int64_t> ring_;  // pull whose token lies there
  std::map<Place, std::int64_t> memory_;
  std::map<std::int32_t, std::int64_t> pulls_of_, hidden_done_, recomputed_, minibatch_done_, token_reads_, row_reads_,
      recompute_reads_, shared_hidden_, shared_recomputed_;
};

}  // namespace moewave::test
