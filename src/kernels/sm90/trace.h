// The kernel's timeline: what each block did and when, written to device memory when asked for.
#pragma once

#include <cstdint>

namespace moewave::sm90 {

enum class TraceName : std::uint32_t {
  kEntry,
  kSchedule,
  kDispatch,
  kGateUp,
  kDown,
  kSharedGateUp,
  kSharedDown,
  kWait,  // the producer waits for what a task needs
  kExit,
  kMerge,
  kCount,
};
inline constexpr const char* kTraceNames[] = {"entry",          "schedule",    "dispatch", "gate-up", "down",
                                              "shared gate-up", "shared down", "wait",     "exit",    "merge"};

struct TraceEvent {
  std::uint64_t begin_ns;  // %globaltimer
  std::uint64_t end_ns;
  TraceName name;
  std::int32_t index;  // tile, or -1
  std::int32_t minibatch;
  std::uint32_t sm;
};

/// A block has two tracks, each written by one thread: 0 the phases and the tasks, 1 what the producer waited for.
inline constexpr int kTraceTracks = 2;

struct Trace {
  TraceEvent* events;     // [blocks][kTraceTracks][capacity]; null: off
  std::uint32_t* counts;  // [blocks][kTraceTracks] events wanted, also those beyond the capacity
  std::uint32_t capacity;
};

}  // namespace moewave::sm90
