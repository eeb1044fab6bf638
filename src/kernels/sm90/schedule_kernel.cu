#include "kernels/sm90/grid_barrier.cuh"
#include "kernels/sm90/schedule_kernel.h"

namespace moewave::sm90 {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = 16;

// Waits for: nothing; ids lie in place before the launch. Produces: the schedule. Consumer: whoever follows on the
// stream.
__global__ void __launch_bounds__(kWarps* kWarpThreads) schedule_kernel(const ScheduleKernelParams params) {
  __shared__ protocol::PlaceScratch places[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  // Neighbouring workers sit on different SMs: the first workers get the odd block of the token order.
  const int worker = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int workers = kWarps * static_cast<int>(gridDim.x);
  const bool is_first_thread = blockIdx.x == 0 && threadIdx.x == 0;
  GridBarrier barrier(params.barrier, params.barrier_limit_ns);
  int phase = 0;
  const auto end_phase = [&] {
    barrier.arrive_and_wait();
    if (is_first_thread && params.phase_end_ns != nullptr) params.phase_end_ns[phase++] = ptx::global_time_ns();
    return true;
  };

  if (is_first_thread) params.task.schedule.totals->bad_route = protocol::kNoBadRoute;
  end_phase();
  protocol::build_schedule<protocol::WarpLanes>(
      params.task, worker, workers, places[warp], [&](int rank) { return params.ids[rank]; }, end_phase);
}

}  // namespace

cudaError_t launch_schedule(const ScheduleKernelParams& params, int blocks, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(params.barrier, 0, sizeof(GridBarrierState), stream);
  if (cleared != cudaSuccess) return cleared;
  void* arguments[] = {const_cast<ScheduleKernelParams*>(&params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(schedule_kernel), dim3(blocks),
                                     dim3(kWarps * kWarpThreads), arguments, 0, stream);
}

}  // namespace moewave::sm90
