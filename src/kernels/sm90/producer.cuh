// Producer: one warpgroup that takes tasks by a ticket, waits for what they need and fills the stages.
//
// Waits for: the pulls, h of a tile, or a free slot of h (see wait_for_inputs); a free stage. Produces: a task in a
// slot, then stages of A [128, 64] and B [256, 64]. Consumers: the two consumer warpgroups.
//
// A of gate-up is gathered: each row of 128 bytes by eight threads, 16 bytes each, from the token ring or from the
// caller's x, swizzled by hand. A of down lies in the ring of h as the tensor cores read it. B comes by tensor maps.
//
// The next ticket, its task and its rows are fetched during the steps of the current task.
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "protocol/tasks.h"
#include "ptx/copies.cuh"

namespace moewave::sm90 {

__device__ __forceinline__ bool is_gate_up(std::int32_t kind) {
  return kind == static_cast<std::int32_t>(protocol::TaskKind::kGateUp) ||
         kind == static_cast<std::int32_t>(protocol::TaskKind::kSharedGateUp);
}
__device__ __forceinline__ bool is_shared(std::int32_t kind) {
  return kind == static_cast<std::int32_t>(protocol::TaskKind::kSharedGateUp) ||
         kind == static_cast<std::int32_t>(protocol::TaskKind::kSharedDown);
}

/// Steps of 64 in which a task's product is summed.
__device__ __forceinline__ std::int32_t steps_of(const protocol::Geometry& geometry, std::int32_t kind) {
  const std::int64_t depth = is_gate_up(kind)  ? geometry.hidden
                             : is_shared(kind) ? geometry.shared_intermediate
                                               : geometry.intermediate;
  return static_cast<std::int32_t>(protocol::ceil_div(depth, kStepDepth));
}

/// Where tile `place` of a ring of h begins. h lies as the tensor cores read it: a tile is one block of 128 rows by 64
/// columns (16 KB, 128-byte swizzle) after another.
__device__ __forceinline__ Bf16* hidden_tile(const Call& call, bool shared, std::int32_t place) {
  const protocol::WorkspaceLayout& w = call.params.layout.workspace;
  const std::int64_t width =
      protocol::Geometry::padded_width(shared ? call.geometry().shared_intermediate : call.geometry().intermediate);
  return call.workspace(shared ? w.shared_hidden : w.hidden_ring) + place * (protocol::kTileRows * width);
}

/// Counts on h of a tile: each consumer warp counts each column block.
__device__ __forceinline__ std::uint32_t* hidden_counter(const Call& call, bool shared, std::int32_t tile) {
  const protocol::Counters& counters = call.params.layout.counters;
  return call.counter((shared ? counters.shared_hidden : counters.hidden_done) + tile);
}

class Producer {
 public:
  __device__ __forceinline__ Producer(const Call& call, BlockMemory& memory)
      : call_(call), memory_(memory), track_(call.params.trace, 1) {}

  __device__ __forceinline__ void run() {
    if (thread() == 0) {
      memory_.minibatches_pulled = memory_.minibatches_done = 0;
      take_ticket();
      look_up_task();
    }
    sync();
    const Bf16* next_row = find_row();
    for (;;) {
      sync();  // all threads are done with the rows and the flag of the last task
      const protocol::TaskRecord task = memory_.next;
      memory_.row[thread()] = next_row;
      if (thread() == 0) memory_.go = wait_for_inputs(task) ? 1 : 0;
      sync();
      const bool go = memory_.go != 0;
      if (thread() == 0) publish(task, go);
      slot_.advance();
      if (!go) return;
      const std::int32_t steps = steps_of(call_.geometry(), task.kind);
      if (is_gate_up(task.kind)) {
        Rows rows = load_rows();
        for (std::int32_t step = 0; step < steps; ++step) {
          const std::uint32_t full = wait_for_stage();
          if (thread() == 0) load_gate_up(task, step, full);
          gather(rows, step);
          end_stage(full, step, next_row);
          advance(rows);
        }
      } else {
        for (std::int32_t step = 0; step < steps; ++step) {
          const std::uint32_t full = wait_for_stage();
          if (thread() == 0) load_down(task, step, full);
          end_stage(full, step, next_row);
        }
      }
      for (std::int32_t step = steps; step <= kLastPrefetchStep; ++step) prefetch(step, next_row);
    }
  }

 private:
  static constexpr std::int32_t kTicketStep = 1;
  static constexpr std::int32_t kTaskStep = 3;
  static constexpr std::int32_t kLastPrefetchStep = 5;
  static constexpr int kRowsApart = kProducerThreads / 8;
  static constexpr int kRowsOfThread = protocol::kTileRows / kRowsApart;

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static void sync() { ptx::sync_threads(kProducerBarrier, kProducerThreads); }
  __device__ __forceinline__ std::uint64_t limit() const { return 2 * call_.params.pipeline_limit_ns; }

  // ---- The next task

  __device__ __forceinline__ void take_ticket() {
    memory_.ticket = ptx::fetch_add_relaxed_gpu(call_.counter(call_.params.layout.counters.ticket), 1);
  }
  __device__ __forceinline__ void look_up_task() {
    const protocol::WorkspaceLayout& w = call_.params.layout.workspace;
    if (memory_.ticket < *call_.workspace(w.task_count)) {
      memory_.next = call_.workspace(w.tasks)[memory_.ticket];
    } else {
      memory_.next.kind = kNoTask;
    }
  }

  // The row of A that this thread looks up for the others.
  __device__ __forceinline__ const Bf16* find_row() const {
    const protocol::TaskRecord& task = memory_.next;
    if (task.kind == kNoTask || !is_gate_up(task.kind) || thread() >= task.rows) return nullptr;
    const std::int64_t row = std::int64_t{task.tile} * protocol::kTileRows + thread();
    const std::int64_t source = is_shared(task.kind) ? -1 - row : call_.schedule().row_source[row];
    const std::int64_t hidden = call_.geometry().hidden;
    if (source < 0) return call_.params.x + (-1 - source) * hidden;
    return call_.workspace(call_.params.layout.workspace.ring_x) + source * hidden;
  }

  __device__ __forceinline__ void prefetch(std::int32_t step, const Bf16*& next_row) {
    if (step == kTicketStep && thread() == 0) take_ticket();
    if (step == kTaskStep && thread() == 0) look_up_task();
    if (step == kLastPrefetchStep) {
      sync();
      next_row = find_row();
    }
  }

  // ---- What a task needs (thread 0)

  __device__ __forceinline__ bool wait_for(std::int64_t counter, std::int64_t wanted, Awaited what,
                                           std::int32_t number) const {
    return call_.wait<Scope::kGpu>(call_.counter(counter), static_cast<std::uint32_t>(wanted),
                                   {Role::kProducer, what, static_cast<std::uint32_t>(number)},
                                   call_.params.pipeline_limit_ns);
  }

  // Tokens of all minibatches up to q, and the down tasks of all up to q - kHiddenSlots, whose h is written over.
  __device__ __forceinline__ bool wait_for_gate_up_inputs(std::int32_t minibatch) {
    const protocol::Minibatch* minibatches = call_.schedule().minibatches;
    const protocol::Counters& counters = call_.params.layout.counters;
    for (; memory_.minibatches_pulled <= minibatch; ++memory_.minibatches_pulled) {
      const std::int32_t q = memory_.minibatches_pulled;
      const std::int32_t pulls = minibatches[q + 1].pull_begin - minibatches[q].pull_begin;
      if (pulls != 0 && !wait_for(counters.pulled + q, pulls, Awaited::kPulls, q)) return false;
    }
    for (; memory_.minibatches_done <= minibatch - protocol::kHiddenSlots; ++memory_.minibatches_done) {
      const std::int32_t q = memory_.minibatches_done;
      const std::int64_t tiles = minibatches[q + 1].tile_begin - minibatches[q].tile_begin;
      if (!wait_for(counters.minibatch_done + q, tiles * call_.geometry().down_blocks(), Awaited::kHiddenSlot, q)) {
        return false;
      }
      ptx::fence_proxy_async();  // that h was read, and will be written over, by bulk copies
    }
    return true;
  }

  __device__ __forceinline__ bool wait_for_hidden(const protocol::TaskRecord& task) const {
    const bool shared = is_shared(task.kind);
    const std::int64_t width = shared ? call_.geometry().shared_intermediate : call_.geometry().intermediate;
    const std::uint32_t wanted =
        static_cast<std::uint32_t>(kConsumerWarps * protocol::Geometry::blocks(width, protocol::kGateUpColumns));
    const bool came = call_.wait<Scope::kGpu>(
        hidden_counter(call_, shared, task.tile), wanted,
        {Role::kProducer, shared ? Awaited::kSharedHidden : Awaited::kHidden, static_cast<std::uint32_t>(task.tile)},
        call_.params.pipeline_limit_ns);
    ptx::fence_proxy_async();  // h was written, and will be read, by bulk copies
    return came;
  }

  __device__ __forceinline__ bool wait_for_inputs(const protocol::TaskRecord& task) {
    if (task.kind == kNoTask) return false;
    call_.jitter(0x40000000u + static_cast<std::uint32_t>(task.tile * 64 + task.column));
    memory_.wait_begin_ns = track_.now();
    bool came = true;
    if (!is_gate_up(task.kind)) {
      came = wait_for_hidden(task);
    } else if (!is_shared(task.kind)) {
      came = wait_for_gate_up_inputs(task.minibatch);
    }
    track_.record(TraceName::kWait, memory_.wait_begin_ns, task.tile, task.minibatch);
    return came;
  }

  __device__ __forceinline__ void publish(const protocol::TaskRecord& task, bool go) {
    wait_phase(ptx::shared_address(&memory_.slot_free[slot_.place]), slot_.parity ^ 1u, limit());
    memory_.slot[slot_.place] = task;
    if (!go) memory_.slot[slot_.place].kind = kNoTask;
    ptx::arrive(ptx::shared_address(&memory_.slot_full[slot_.place]));
  }

  // ---- Stages

  __device__ __forceinline__ std::uint32_t wait_for_stage() const {
    wait_phase(ptx::shared_address(&memory_.empty[stage_.place]), stage_.parity ^ 1u, limit());
    return ptx::shared_address(&memory_.full[stage_.place]);
  }
  __device__ __forceinline__ void end_stage(std::uint32_t full, std::int32_t step, const Bf16*& next_row) {
    ptx::arrive_after_async_copies(full);
    stage_.advance();
    prefetch(step, next_row);
  }

  // Thread 0: B of gate-up, 128 rows of gate and 128 of up.
  __device__ __forceinline__ void load_gate_up(const protocol::TaskRecord& task, std::int32_t step,
                                               std::uint32_t full) const {
    const ExpertMaps& maps = is_shared(task.kind) ? call_.params.shared : call_.params.routed;
    const std::uint32_t b = ptx::shared_address(memory_.stages[stage_.place].b);
    const int depth = step * kStepDepth;
    const int row = task.column * protocol::kGateUpColumns;
    ptx::arrive_expecting(full, kBBytes);
    if (maps.gate_lies_first) {
      ptx::tensor_load(b, &maps.gate_up, full, depth, row, 0, task.expert);
    } else {
      ptx::tensor_load(b, &maps.gate_up, full, depth, row, 1, task.expert);
      ptx::tensor_load(b + kBBytes / 2, &maps.gate_up, full, depth, row, 0, task.expert);
    }
  }

  // Thread 0: A and B of down.
  __device__ __forceinline__ void load_down(const protocol::TaskRecord& task, std::int32_t step,
                                            std::uint32_t full) const {
    const bool shared = is_shared(task.kind);
    const ExpertMaps& maps = shared ? call_.params.shared : call_.params.routed;
    const Stage& stage = memory_.stages[stage_.place];
    const Bf16* a = hidden_tile(call_, shared, task.hidden_place) + std::int64_t{step} * (kABytes / 2);
    ptx::arrive_expecting(full, kABytes + kBBytes);
    ptx::bulk_load(ptx::shared_address(stage.a), a, kABytes, full);
    ptx::tensor_load(ptx::shared_address(stage.b), &maps.down, full, step * kStepDepth,
                     task.column * protocol::kDownColumns, task.expert);
  }

  // What this thread gathers: a piece of eight columns of eight rows, and where these pieces lie in the current step.
  // Registers of their own keep the copies from waiting for one another's addresses. Bit i of `exist` is clear where
  // row i is zero.
  struct Rows {
    const Bf16* from[kRowsOfThread];
    std::uint32_t exist;
  };
  static constexpr std::uint32_t kAllExist = (1u << kRowsOfThread) - 1;

  __device__ __forceinline__ Rows load_rows() const {
    Rows rows;
    rows.exist = 0;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const Bf16* row = memory_.row[thread() / 8 + i * kRowsApart];
      rows.exist |= row != nullptr ? 1u << i : 0u;
      rows.from[i] = row + thread() % 8 * 8;
    }
    return rows;
  }
  __device__ __forceinline__ static void advance(Rows& rows) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) rows.from[i] += kStepDepth;
  }

  __device__ __forceinline__ void gather(const Rows& rows, std::int32_t step) const {
    const int piece = thread() % 8;
    const int first_row = thread() / 8;
    const std::uint32_t column = static_cast<std::uint32_t>(step * kStepDepth + piece * 8);
    const std::uint32_t exist = column < static_cast<std::uint32_t>(call_.geometry().hidden) ? rows.exist : 0u;
    const std::uint32_t to = ptx::shared_address(memory_.stages[stage_.place].a) +
                             static_cast<std::uint32_t>(first_row * kOperandRowBytes + (piece ^ (first_row % 8)) * 16);
    constexpr std::uint32_t kApart = kRowsApart * kOperandRowBytes;
    if (exist == kAllExist) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) ptx::copy_16(to + i * kApart, rows.from[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        ptx::copy_16_or_zero(to + i * kApart, rows.from[i], (exist >> i & 1u) * 16);
      }
    }
  }

  const Call call_;
  BlockMemory& memory_;
  Track track_;
  Cursor<kStages> stage_;
  Cursor<kSlots> slot_;
};

}  // namespace moewave::sm90
