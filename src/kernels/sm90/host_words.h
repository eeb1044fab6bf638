// What a kernel tells its host: words in host memory that is mapped into the device, one set a rank.
#pragma once

#include <cstdint>

namespace moewave::sm90 {

enum class Role : std::uint32_t { kEntry, kSchedule, kDispatch, kProducer, kConsumer, kExit, kCount };
inline constexpr const char* kRoleNames[] = {"entry", "schedule", "dispatch", "producer", "consumer", "exit"};

/// What a wait is for; `number` says which one.
enum class Awaited : std::uint32_t {
  kStagedIds,      // blocks of this rank at the end of staging
  kIdsFlag,        // ids of rank `number`
  kXFlag,          // x of rank `number`
  kGridBarrier,    // blocks of this rank, barrier `number` of the call
  kTokenSegment,   // readers of macrobatch `number`
  kPulls,          // pulls of minibatch `number`
  kHiddenSlot,     // down tasks of minibatch `number`
  kHidden,         // h of tile `number`
  kSharedHidden,   // h of the shared expert, tile `number`
  kExitFlag,       // exit of rank `number`
  kBlockPipeline,  // a barrier in shared memory: a fault of the kernel itself
  kCount,
};
inline constexpr const char* kAwaitedNames[] = {
    "staged blocks", "ids of rank", "x of rank",     "grid barrier", "readers of macrobatch", "pulls of minibatch",
    "h ring",        "h of tile",   "shared h tile", "exit of rank", "block pipeline"};

/// The first wait of a rank that reached its limit. `state` is 0, then 1 while it is written, then 2.
struct StopRecord {
  std::uint32_t state;
  std::uint32_t block;
  Role role;
  Awaited awaited;
  std::uint32_t number;
  std::uint32_t wanted;
  std::uint32_t seen;
  std::uint32_t epoch;
};

struct HostWords {
  StopRecord stop;

  // Sticky until the host clears it: the first call with an id out of range, and the lowest such route
  // (rank * max_tokens * topk + route) of that call.
  std::uint32_t bad_route_epoch;
  std::uint32_t has_bad_route;
  std::int64_t bad_route;

  // Sticky: the first call that was not run: EntryVerdict, and the rank it is about.
  std::uint32_t has_verdict;
  std::uint32_t verdict_epoch;
  std::uint32_t verdict;
  std::int32_t verdict_rank;
  std::int64_t verdict_tokens;  // of that rank
};

}  // namespace moewave::sm90
