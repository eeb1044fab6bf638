#include "kernels/sm90/forward_kernel.h"

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/consumer.cuh"
#include "kernels/sm90/dispatch.cuh"
#include "kernels/sm90/entry.cuh"
#include "kernels/sm90/exit.cuh"
#include "kernels/sm90/producer.cuh"

namespace moewave::sm90 {
namespace {

extern __shared__ __align__(1024) std::uint8_t dynamic_memory[];

__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  BlockMemory& memory = *reinterpret_cast<BlockMemory*>(dynamic_memory);
  EntryMemory& entry_memory = *reinterpret_cast<EntryMemory*>(dynamic_memory);
  const Call call(params);
  const Track track(params.trace, 0);
  const bool records = threadIdx.x == 0;
  init_barriers(memory);
  if (__syncthreads_or(threadIdx.x == 0 && call.is_stopped() ? 1 : 0) != 0) return;

  std::uint64_t begin = track.now();
  GridRounds rounds;
  const Entered entered = enter(call, entry_memory, rounds);
  if (entered == Entered::kAbandoned) abandon(call, entry_memory);
  if (entered != Entered::kGo) return;
  if (records) track.record(TraceName::kEntry, begin);

  begin = track.now();
  if (!make_schedule(call, entry_memory, rounds)) return;
  if (records) track.record(TraceName::kSchedule, begin);

  if (static_cast<int>(blockIdx.x) < params.comm_blocks) {
    begin = track.now();
    if (!dispatch(call, memory)) return;
    if (records) track.record(TraceName::kDispatch, begin);
  }
  ptx::fence_proxy_async();  // the stages held ordinary data
  __syncthreads();

  if (threadIdx.x < kProducerThreads) {
    ptx::shrink_registers<kProducerRegisters>();
    Producer(call, memory).run();
  } else {
    ptx::grow_registers<kConsumerRegisters>();
    Consumer(call, memory).run();
    const bool leads = threadIdx.x == kProducerThreads;
    begin = track.now();
    const bool all_left = leave(call, memory);
    if (leads) track.record(TraceName::kExit, begin);
    if (all_left) {
      begin = track.now();
      merge(call);
      if (leads) track.record(TraceName::kMerge, begin);
    }
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
