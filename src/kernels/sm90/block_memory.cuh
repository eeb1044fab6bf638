// The shared memory of a block and the roles of its threads.
#pragma once

#include <cstdint>

#include "protocol/layout.h"
#include "ptx/mbarrier.cuh"
#include "ptx/synchronization.cuh"

namespace moewave::sm90 {

// ---- Threads: one warpgroup loads, two multiply 64 rows of a tile each.

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kProducerThreads = kWarpgroup;
inline constexpr int kConsumerThreads = 2 * kWarpgroup;
inline constexpr int kConsumerWarps = kConsumerThreads / kWarp;
inline constexpr int kThreads = kProducerThreads + kConsumerThreads;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

// Barriers of part of a block; 0 is __syncthreads.
inline constexpr int kProducerBarrier = 1;
inline constexpr int kConsumerBarrier = 2;

// ---- Tiles: 128 rows by 256 columns, 64 deep

inline constexpr int kStepDepth = 64;
inline constexpr int kStages = 4;
inline constexpr int kOperandRowBytes = kStepDepth * 2;
inline constexpr int kABytes = protocol::kTileRows * kOperandRowBytes;
inline constexpr int kBBytes = protocol::kDownColumns * kOperandRowBytes;
static_assert(protocol::kDownColumns == 2 * protocol::kGateUpColumns);

// Tasks between producer and consumers: one whose stages are being filled, one that is being multiplied, one whose
// results are on their way.
inline constexpr int kSlots = 3;

// A warp's results on their way out: 8 rows of 512 bytes with room against bank conflicts, or 16 rows of two times 128
// bytes of h.
inline constexpr int kStagingRows = 8;
inline constexpr int kStagingPitch = protocol::kDownColumns * 2 + 16;
inline constexpr int kStagingBytes = kStagingRows * kStagingPitch;

// Dispatch: each warp moves token rows through a buffer of its own.
inline constexpr int kDispatchBytes = 16384;

struct Stage {
  std::uint8_t a[kABytes];
  std::uint8_t b[kBBytes];
};

/// Task kinds that only the producer and the consumers know.
inline constexpr std::int32_t kNoTask = -1;

struct BlockMemory {
  union {
    Stage stages[kStages];
    std::uint8_t dispatch[kWarps][kDispatchBytes];
  };
  std::uint8_t staging[kConsumerWarps][kStagingBytes];
  const Bf16* row[protocol::kTileRows];  // the rows that the producer gathers, null: zeros
  protocol::TaskRecord slot[kSlots];     // what the consumers are to do next
  protocol::TaskRecord next;             // the producer's next task
  ptx::Mbarrier full[kStages];
  ptx::Mbarrier empty[kStages];
  ptx::Mbarrier slot_full[kSlots];
  ptx::Mbarrier slot_free[kSlots];
  ptx::Mbarrier pulled[kWarps];
  ptx::Mbarrier staged[kWarps];
  std::uint32_t epoch;  // of the call
  std::uint32_t ticket;
  std::uint32_t go;
  std::uint32_t all_left;
  // What the producer's first thread knows; here because its registers are few.
  std::int32_t minibatches_pulled;  // the first minibatch whose pulls are not known to be done
  std::int32_t minibatches_done;    // the first one whose down tasks are not known to be done
  std::uint64_t wait_begin_ns;      // for the timeline
  std::uint64_t task_begin_ns;      // of the consumers' task, likewise
};
static_assert(sizeof(BlockMemory) <= 232448, "a block has 227 KB");

__device__ __forceinline__ void init_barriers(BlockMemory& memory) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::init_mbarrier(ptx::shared_address(&memory.full[i]), kProducerThreads + 1);
      ptx::init_mbarrier(ptx::shared_address(&memory.empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      ptx::init_mbarrier(ptx::shared_address(&memory.slot_full[i]), 1);
      ptx::init_mbarrier(ptx::shared_address(&memory.slot_free[i]), kConsumerWarps);
    }
    for (ptx::Mbarrier& barrier : memory.pulled) ptx::init_mbarrier(ptx::shared_address(&barrier), kWarp);
    for (ptx::Mbarrier& barrier : memory.staged) ptx::init_mbarrier(ptx::shared_address(&barrier), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

/// Waits for the end of a phase of a barrier in shared memory. Every such wait ends by the block's own doing, or after
/// the producer's own bounded waits; that one does not is a fault of the kernel, which ends the launch with an error.
__device__ __forceinline__ void wait_phase(std::uint32_t barrier, std::uint32_t parity, std::uint64_t limit_ns) {
  constexpr int kTriesBetweenChecks = 1024;  // the timer is slow to read
  std::uint64_t begin = 0;
  for (;;) {
#pragma unroll 1
    for (int i = 0; i < kTriesBetweenChecks; ++i) {
      if (ptx::try_wait(barrier, parity)) return;
    }
    const std::uint64_t now = ptx::global_time_ns();
    if (begin == 0) begin = now;
    if (now - begin > limit_ns) ptx::fault();
  }
}

/// A place in a ring of barriers and the parity of its current round.
template <int kPlaces>
struct Cursor {
  std::uint32_t place = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++place == kPlaces) {
      place = 0;
      parity ^= 1u;
    }
  }
};

}  // namespace moewave::sm90
