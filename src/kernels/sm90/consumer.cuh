// Consumers: two warpgroups, each multiplies 64 rows of a tile by its 256 columns.
//
// Waits for: a task in a slot, full stages. Produces: free stages and slots; sums for the epilogue; counts on the
// minibatch (down: its slot of h has been read) and on the macrobatch (gate-up: its tokens have been read).
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "ptx/wgmma.cuh"

namespace moewave::sm90 {

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Call& call, BlockMemory& memory)
      : call_(call), memory_(memory), epilogue_(call, memory) {}

  __device__ __forceinline__ void run() {
    float sums[ptx::kAccumulators];
    for (;;) {
      const std::uint32_t full = ptx::shared_address(&memory_.slot_full[slot_.place]);
      // The next task waits for something: what it waits for may hang on this epilogue.
      if (epilogue_.is_pending() && !ptx::try_wait(full, slot_.parity)) epilogue_.flush();
      wait_phase(full, slot_.parity, limit());
      const protocol::TaskRecord& task = memory_.slot[slot_.place];
      if (task.kind == kNoTask) break;
      const Track track(call_.params.trace, 0);
      if (is_leader()) memory_.task_begin_ns = track.now();
      multiply(steps_of(call_.geometry(), task.kind), sums);
      count_reads(task);
      epilogue_.take(slot_.place, sums);
      if (is_leader()) track.record(trace_name(task.kind), memory_.task_begin_ns, task.tile, task.minibatch);
      slot_.advance();
    }
    if (epilogue_.is_pending()) epilogue_.flush();
    ptx::wait_bulk_stores_done();
  }

 private:
  static constexpr int kStepProducts = kStepDepth / 16;
  static constexpr std::int32_t kCountStep = kPieces + 3;  // by then the stores of h have arrived

  __device__ __forceinline__ static bool is_leader() { return threadIdx.x == kProducerThreads; }
  __device__ __forceinline__ static bool is_first_lane() { return threadIdx.x % kWarp == 0; }
  __device__ __forceinline__ std::uint64_t limit() const {
    return 4 * call_.params.pipeline_limit_ns + call_.params.entry_limit_ns;
  }

  __device__ __forceinline__ void start_step(bool keeps, float (&sums)[ptx::kAccumulators]) {
    wait_phase(ptx::shared_address(&memory_.full[stage_.place]), stage_.parity, limit());
    ptx::fence_proxy_async_shared();  // gathered rows were written by ordinary copies
    const Stage& stage = memory_.stages[stage_.place];
    const std::uint32_t warpgroup = threadIdx.x / kWarpgroup - kProducerThreads / kWarpgroup;
    const std::uint64_t a = ptx::operand_descriptor(ptx::shared_address(stage.a) + warpgroup * (64 * kOperandRowBytes));
    const std::uint64_t b = ptx::operand_descriptor(ptx::shared_address(stage.b));
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < kStepProducts; ++i) {
      constexpr std::uint64_t kStep = 32 >> 4;  // 16 columns are 32 bytes
      ptx::multiply_m64n256k16(sums, a + i * kStep, b + i * kStep, keeps || i > 0 ? 1 : 0);
    }
    ptx::commit_products();
  }

  // The stage before the current one has been read.
  __device__ __forceinline__ void free_last_stage() {
    if (is_first_lane()) ptx::arrive(ptx::shared_address(&memory_.empty[(stage_.place + kStages - 1) % kStages]));
  }

  template <int kStep>
  __device__ __forceinline__ void first_steps(std::int32_t steps, float (&sums)[ptx::kAccumulators]) {
    if constexpr (kStep < kPieces) {
      if (kStep < steps) start_step(kStep > 0, sums);
      if (epilogue_.is_pending()) epilogue_.piece<kStep>();
      if (kStep < steps) {
        if constexpr (kStep > 0) {
          ptx::wait_products<1>();
          free_last_stage();
        }
        stage_.advance();
      }
      first_steps<kStep + 1>(steps, sums);
    }
  }

  __device__ __forceinline__ void multiply(std::int32_t steps, float (&sums)[ptx::kAccumulators]) {
    first_steps<0>(steps, sums);
    if (epilogue_.is_pending()) epilogue_.end_pieces();
    epilogue_.find_destination(slot_.place);
    for (std::int32_t step = kPieces; step < steps; ++step) {
      start_step(true, sums);
      if (step == kCountStep) epilogue_.count_hidden();
      ptx::wait_products<1>();
      free_last_stage();
      stage_.advance();
    }
    ptx::wait_products<0>();
    free_last_stage();
    epilogue_.count_hidden();
  }

  // All of A has arrived in shared memory.
  __device__ __forceinline__ void count_reads(const protocol::TaskRecord& task) const {
    if (!is_leader() || is_shared(task.kind)) return;
    const protocol::Counters& counters = call_.params.layout.counters;
    if (!is_gate_up(task.kind)) {
      ptx::add_release_gpu(call_.counter(counters.minibatch_done + task.minibatch), 1);
    } else if (call_.geometry().segments > 1) {
      ptx::add_release_gpu(call_.counter(counters.token_reads + task.macrobatch), 1);
    }
  }

  __device__ __forceinline__ static TraceName trace_name(std::int32_t kind) {
    if (is_shared(kind)) return is_gate_up(kind) ? TraceName::kSharedGateUp : TraceName::kSharedDown;
    return is_gate_up(kind) ? TraceName::kGateUp : TraceName::kDown;
  }

  const Call call_;
  BlockMemory& memory_;
  Epilogue epilogue_;
  Cursor<kStages> stage_;
  Cursor<kSlots> slot_;
};

}  // namespace moewave::sm90
