#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/consumer.cuh"
#include "kernels/sm90/dispatch.cuh"
#include "kernels/sm90/entry.cuh"
#include "kernels/sm90/exit.cuh"
#include "kernels/sm90/forward_kernel.h"
#include "kernels/sm90/producer.cuh"

namespace moewave::sm90 {
namespace {

extern __shared__ __align__(1024) std::uint8_t dynamic_memory[];

// Entry to dispatch, by all threads of a block. False on all of them when there is nothing to compute.
__device__ __forceinline__ bool prepare(const Call& call, BlockMemory& memory) {
  EntryMemory& entry_memory = *reinterpret_cast<EntryMemory*>(memory.staging);
  const Track track(call.params.trace, 0);
  const bool records = threadIdx.x == 0;
  if (__syncthreads_or(threadIdx.x == 0 && call.is_stopped() ? 1 : 0) != 0) return false;

  std::uint64_t begin = track.now();
  GridRounds rounds;
  const Entered entered = enter(call, entry_memory, rounds);
  if (entered == Entered::kAbandoned) abandon(call, entry_memory);
  if (entered != Entered::kGo) return false;
  if (records) track.record(TraceName::kEntry, begin);

  begin = track.now();
  XStager stager(call, memory);
  if (!make_schedule(call, entry_memory, rounds, stager)) return false;
  if (records) track.record(TraceName::kSchedule, begin);

  if (static_cast<int>(ptx::block_index()) < call.params.comm_blocks) {
    begin = track.now();
    if (!dispatch(call, memory)) return false;
    if (records) track.record(TraceName::kDispatch, begin);
  }
  ptx::fence_proxy_async();  // the consumers' buffers held ordinary data
  __syncthreads();
  return true;
}

// All consumer threads, when no task is left.
__device__ __forceinline__ void exit_call(const Call& call, BlockMemory& memory) {
  const Track track(call.params.trace, 0);
  const bool records = threadIdx.x == kProducerThreads;
  if (records) memory.task_begin_ns = track.now();
  const bool all_left = leave(call, memory);
  if (records) track.record(TraceName::kExit, memory.task_begin_ns);
  if (!all_left) return;
  if (records) memory.task_begin_ns = track.now();
  Merge(call).run();
  if (records) track.record(TraceName::kMerge, memory.task_begin_ns);
}

__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  BlockMemory& memory = *reinterpret_cast<BlockMemory*>(dynamic_memory);
  {
    const Call call(params, *params.layout.workspace.epoch.at(params.workspace) + 1);
    if (threadIdx.x == 0) memory.epoch = call.epoch;
    init_barriers(memory);
    if (!prepare(call, memory)) return;
  }
  // From here on each role has registers of its own, and few: what comes before is not to be kept in them.
  if (threadIdx.x < kProducerThreads) {
    ptx::shrink_registers<kProducerRegisters>();
    Producer(Call(params, memory.epoch), memory).run();
  } else {
    ptx::grow_registers<kConsumerRegisters>();
    Consumer(Call(params, memory.epoch), memory).run();
    exit_call(Call(params, memory.epoch), memory);
  }
}

}  // namespace

std::int64_t forward_shared_bytes() { return sizeof(BlockMemory); }
int forward_threads() { return kThreads; }

cudaError_t prepare_forward() {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(forward_kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(BlockMemory)));
}

cudaError_t launch_forward(const ForwardParams& params, int blocks, cudaStream_t stream) {
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(forward_kernel), dim3(static_cast<unsigned>(blocks)),
                                     dim3(kThreads), arguments, sizeof(BlockMemory), stream);
}

}  // namespace moewave::sm90
