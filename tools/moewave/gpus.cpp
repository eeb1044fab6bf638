#include "gpus.h"

#include <cstdlib>

#include "cuda_backend.h"

namespace moewave::cli {

std::vector<int> GpuState::usable_devices() const {
  std::vector<int> devices;
  for (const Gpu& gpu : gpus) {
    if (gpu.usable) devices.push_back(gpu.device);
  }
  return devices;
}

const GpuState& gpu_state() {
  static const GpuState state = look_for_gpus();
  return state;
}

void prepare_cuda_environment() {
  // Ranks that share a GPU need a queue of work each; the default is 8. What the user has set stays.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);  // NOLINT(concurrency-mt-unsafe): no threads yet
}

std::vector<int> devices_of_ranks(int ranks) {
  const std::vector<int> usable = gpu_state().usable_devices();
  std::vector<int> devices(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 0; rank < devices.size(); ++rank) devices[rank] = usable[rank % usable.size()];
  return devices;
}

}  // namespace moewave::cli
