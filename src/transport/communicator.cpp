// What all communicators know: ranks, devices, and who shares a GPU with whom.
#include "moewave/communicator.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "transport/cuda_check.h"
#include "transport/together.h"

namespace moewave {
namespace {

using Uuid = decltype(cudaDeviceProp::uuid);

// The same for all processes between two starts of a host, containers included, and for no other host.
std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string uuids_of(std::span<const int> devices) {
  std::string uuids;
  for (const int device : devices) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    uuids.append(properties.uuid.bytes, sizeof(Uuid));
  }
  return uuids;
}

void check_devices(std::span<const int> devices) {
  if (devices.empty()) throw InputError("this process has no ranks; it must have at least 1 device to run one on");
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    throw InputError("no GPU can be used: " +
                     std::string(status == cudaSuccess ? "none is visible" : cudaGetErrorString(status)));
  }
  for (const int device : devices) {
    if (device < 0 || device >= count) {
      throw InputError("device " + std::to_string(device) + " does not exist; allowed are 0 to " +
                       std::to_string(count - 1));
    }
  }
}

}  // namespace

void Communicator::describe(std::span<const int> devices, std::shared_ptr<ProcessGroup> processes) {
  processes_ = std::move(processes);
  std::string own_uuids;
  together(*processes_, [&] {
    check_devices(devices);
    own_uuids = uuids_of(devices);
  });

  const std::vector<std::string> hosts = processes_->all_gather(host_identity());
  for (std::size_t process = 1; process < hosts.size(); ++process) {
    if (hosts[process] == hosts[0]) continue;
    throw InputError("process " + std::to_string(process) +
                     " is on another host than process 0; all ranks must be on "
                     "one host");
  }

  const std::vector<std::string> uuids = processes_->all_gather(own_uuids);
  std::string all;
  int first_rank = 0;
  for (std::size_t process = 0; process < uuids.size(); ++process) {
    if (static_cast<int>(process) == processes_->process()) first_rank = static_cast<int>(all.size() / sizeof(Uuid));
    all += uuids[process];
  }
  size_ = static_cast<int>(all.size() / sizeof(Uuid));
  for (std::size_t i = 0; i < devices.size(); ++i) {
    local_.push_back({first_rank + static_cast<int>(i), devices[i]});
    int sharing = 0;
    for (std::size_t at = 0; at < all.size(); at += sizeof(Uuid)) {
      sharing += std::memcmp(all.data() + at, own_uuids.data() + i * sizeof(Uuid), sizeof(Uuid)) == 0 ? 1 : 0;
    }
    ranks_on_device_.push_back(sharing);
  }
  together(*processes_, [&] {
    for (std::size_t i = 0; i < local_.size(); ++i) {
      if (ranks_on_device_[i] <= kMaxRanksPerDevice) continue;
      throw InputError("device " + std::to_string(local_[i].device) + " has " + std::to_string(ranks_on_device_[i]) +
                       " ranks; allowed are 1 to " + std::to_string(kMaxRanksPerDevice));
    }
  });
}

}  // namespace moewave
