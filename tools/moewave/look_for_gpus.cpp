#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "cuda_backend.h"

namespace moewave::cli {

GpuState look_for_gpus() {
  GpuState state;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    state.obstacle =
        fmt::format("no GPU can be used ({})", status == cudaSuccess ? "none is visible" : cudaGetErrorString(status));
    return state;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    Gpu gpu;
    gpu.device = device;
    gpu.name = properties.name;
    gpu.capability = fmt::format("{}.{}", properties.major, properties.minor);
    gpu.sms = properties.multiProcessorCount;
    gpu.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    gpu.usable = gpu.capability == "9.0";
    state.gpus.push_back(gpu);
  }
  if (state.usable_devices().empty()) {
    state.obstacle = fmt::format("no GPU can be used (GPU 0 has compute capability {}, needed is 9.0)",
                                 state.gpus.empty() ? "unknown" : state.gpus[0].capability);
  }
  return state;
}

}  // namespace moewave::cli
