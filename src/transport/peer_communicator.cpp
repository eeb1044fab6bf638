// Memory that the library allocates itself: shared by peer access within a process, by IPC handles between processes.
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "moewave/communicator.h"
#include "transport/cuda_check.h"
#include "transport/together.h"

namespace moewave {
namespace {

// CUDA hands out small allocations from blocks of this size, and an IPC handle shares the whole block: allocations in
// whole blocks share nothing else and begin where the handle does.
constexpr std::int64_t kIpcBlockBytes = std::int64_t{2} << 20;

void append(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }

void enable_peer_access(const std::vector<LocalRank>& local) {
  std::set<int> devices;
  for (const LocalRank& rank : local) devices.insert(rank.device);
  std::string missing;
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      int possible = 0;
      check_cuda(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
      if (possible == 0) {
        append(missing, std::to_string(from) + " to " + std::to_string(to));
        continue;
      }
      const DeviceGuard guard(from);
      const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check_cuda(status,
                   "cudaDeviceEnablePeerAccess from device " + std::to_string(from) + " to " + std::to_string(to));
      }
    }
  }
  if (!missing.empty()) {
    throw InputError("no peer access between devices " + missing + "; every GPU must reach the memory of every other");
  }
}

class PeerMemory final : public SharedMemory {
 public:
  PeerMemory(const Communicator& communicator, std::int64_t bytes) : communicator_(communicator) {
    const std::vector<LocalRank>& local = communicator_.local();
    ProcessGroup& processes = communicator_.processes();
    const bool is_alone = processes.processes() == 1;
    const std::int64_t rounded = (bytes + kIpcBlockBytes - 1) / kIpcBlockBytes * kIpcBlockBytes;
    std::string handles;
    together(processes, [&] {
      for (const LocalRank& rank : local) {
        own_.push_back(allocate_on(rank.device, rounded, "shared memory of rank " + std::to_string(rank.rank)));
        if (is_alone) continue;
        const DeviceGuard guard(rank.device);
        cudaIpcMemHandle_t handle{};
        check_cuda(cudaIpcGetMemHandle(&handle, own_.back().get()), "cudaIpcGetMemHandle");
        handles.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
      }
    });
    std::string all;
    for (const std::string& theirs : processes.all_gather(handles)) all += theirs;
    try {
      together(processes, [&] { open_all(all); });
    } catch (...) {
      release();  // the destructor does not run
      throw;
    }
  }

  ~PeerMemory() override { release(); }

  const std::vector<void*>& bases(std::size_t index) const override { return bases_[index]; }

 private:
  void open_all(const std::string& handles) {
    const std::vector<LocalRank>& local = communicator_.local();
    std::string unreachable;
    for (const LocalRank& reader : local) {
      std::vector<void*>& bases = bases_.emplace_back(static_cast<std::size_t>(communicator_.size()));
      const DeviceGuard guard(reader.device);
      for (int rank = 0; rank < communicator_.size(); ++rank) {
        void*& base = bases[static_cast<std::size_t>(rank)];
        const int index = rank - local.front().rank;
        if (index >= 0 && index < static_cast<int>(local.size())) {
          base = own_[static_cast<std::size_t>(index)].get();
          continue;
        }
        cudaIpcMemHandle_t handle{};
        std::memcpy(&handle, handles.data() + static_cast<std::size_t>(rank) * sizeof(handle), sizeof(handle));
        const cudaError_t status = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
        if (status == cudaSuccess) {
          opened_.emplace_back(reader.device, base);
        } else {
          cudaGetLastError();
          append(unreachable,
                 std::to_string(reader.rank) + " to " + std::to_string(rank) + " (" + cudaGetErrorString(status) + ")");
        }
      }
    }
    if (!unreachable.empty()) {
      throw InputError("no peer access between ranks " + unreachable +
                       "; every GPU must reach the memory of every other");
    }
  }

  // Nobody frees memory that others still have open.
  void release() noexcept {
    try {
      for (const auto& [device, base] : std::exchange(opened_, {})) {
        const DeviceGuard guard(device);
        cudaIpcCloseMemHandle(base);
      }
      communicator_.processes().barrier();
    } catch (const std::exception&) {  // a process is gone, and its mappings with it
    }
  }

  const Communicator& communicator_;
  std::vector<DeviceMemory> own_;              // [local ranks]
  std::vector<std::vector<void*>> bases_;      // [local ranks][size]
  std::vector<std::pair<int, void*>> opened_;  // device, address
};

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(std::span<const int> devices, std::shared_ptr<ProcessGroup> group) {
    describe(devices, std::move(group));
    together(processes(), [&] { enable_peer_access(local()); });
  }

  std::unique_ptr<SharedMemory> allocate(std::int64_t bytes) override {
    return std::make_unique<PeerMemory>(*this, bytes);
  }
};

}  // namespace

std::shared_ptr<Communicator> in_process(std::span<const int> devices) {
  return std::make_shared<PeerCommunicator>(devices, join_process_group({}));
}

std::shared_ptr<Communicator> across_processes(std::shared_ptr<ProcessGroup> processes, std::span<const int> devices) {
  if (processes == nullptr) throw InputError("across_processes needs a process group");
  return std::make_shared<PeerCommunicator>(devices, std::move(processes));
}

}  // namespace moewave
