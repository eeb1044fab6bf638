// The GPUs of this machine, and whether the backend cuda can run on them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moewave::cli {

struct Gpu {
  int device = 0;  ///< CUDA's number
  std::string name;
  std::string capability;  ///< compute capability, "9.0"
  int sms = 0;
  std::int64_t memory_bytes = 0;
  bool usable = false;  ///< by the backend cuda
};

struct GpuState {
  std::vector<Gpu> gpus;
  std::string obstacle;  ///< why the backend cuda cannot run; empty: it can

  std::vector<int> usable_devices() const;
};

/// Looked up at the first call.
const GpuState& gpu_state();

/// What has to be said to CUDA before it starts.
void prepare_cuda_environment();

/// GPUs of `ranks` ranks: rank r on the (r % GPUs)-th usable one.
std::vector<int> devices_of_ranks(int ranks);

}  // namespace moewave::cli
