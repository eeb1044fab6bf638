// Time for timelines: what the run would look like if every emulated SM had a processor of its own.
//
// An emulator runs dozens of SMs on a few processors, so on the wall clock an SM seems busy while it is only
// descheduled. In logical time an SM's clock grows by the processor time of its own work, and a wait ends at the time
// at which the last of those it waited for raised the counter or flag. Each word that SMs wait for has a stamp beside
// it: the latest clock of those who raised it. Tickets are drawn in the order of the clocks.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "moewave/error.h"

namespace moewave::cpu {

/// Processor time of the calling thread.
inline std::int64_t thread_time_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// The stamps of all words and the clocks of all SMs of a run.
class LogicalTime {
 public:
  static constexpr std::int64_t kIdle = std::numeric_limits<std::int64_t>::max();

  LogicalTime(int ranks, int sms)
      : sms_(sms), clocks_(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(sms)) {
    for (auto& clock : clocks_) clock.store(kIdle);
  }

  /// Words in [first, first + count) get stamps. All regions are added before the threads begin.
  void add_region(const std::uint32_t* first, std::int64_t count) {
    regions_.push_back({first, std::vector<std::atomic<std::int64_t>>(static_cast<std::size_t>(count))});
  }

  /// To be called before the word itself is raised: its release publishes the stamp.
  void raise(const std::uint32_t* word, std::int64_t clock) {
    std::atomic<std::int64_t>& stamp = stamp_of(word);
    std::int64_t seen = stamp.load(std::memory_order_relaxed);
    while (seen < clock && !stamp.compare_exchange_weak(seen, clock, std::memory_order_relaxed)) {
    }
  }
  std::int64_t raised_at(const std::uint32_t* word) { return stamp_of(word).load(std::memory_order_relaxed); }

  /// The clock of an SM that may draw a ticket; kIdle while it waits or plays another role.
  void publish(int rank, int sm, std::int64_t clock) {
    clocks_[static_cast<std::size_t>(rank) * static_cast<std::size_t>(sms_) + static_cast<std::size_t>(sm)].store(
        clock);
  }
  bool is_first_of_rank(int rank, std::int64_t clock) const {
    const auto first = clocks_.begin() + std::int64_t{rank} * sms_;
    return std::none_of(first, first + sms_, [&](const auto& other) { return other.load() < clock; });
  }

 private:
  struct WordRegion {
    const std::uint32_t* first;
    std::vector<std::atomic<std::int64_t>> stamps;
  };

  std::atomic<std::int64_t>& stamp_of(const std::uint32_t* word) {
    for (WordRegion& region : regions_) {
      const auto place = static_cast<std::size_t>(word - region.first);  // huge when the word lies before the region
      if (place < region.stamps.size()) return region.stamps[place];
    }
    throw Error("a counter or flag has no stamp");
  }

  int sms_;
  std::vector<WordRegion> regions_;
  std::vector<std::atomic<std::int64_t>> clocks_;
};

}  // namespace moewave::cpu
