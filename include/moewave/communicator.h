// Which ranks of a layer live in this process, on which GPUs, and how all ranks reach each other's memory.
//
// A communicator only makes addresses: kernels read and write their peers' memory with ordinary loads and stores. So
// every GPU must be able to reach every other's memory (peer access), within one host.
//
// Missing: NCCL windows, which would reach the GPUs of one NVLink domain that spans several hosts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moewave/process_group.h"

namespace moewave {

/// A rank of this process. `device` is a CUDA device number of this process.
struct LocalRank {
  int rank = 0;
  int device = 0;
};

/// Ranks that share a GPU run at the same time, each on some of its SMs, on streams of their own. CUDA gives a process
/// at most this many queues of work (environment variable CUDA_DEVICE_MAX_CONNECTIONS=32, to be set before CUDA starts;
/// the default is 8); with more ranks than queues they would wait for each other for ever.
inline constexpr int kMaxRanksPerDevice = 32;

/// One block of device memory for each rank, all of the same size, which all ranks can reach.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Addresses of all ranks' blocks, [size], as rank local()[index] of the communicator sees them from its device.
  virtual const std::vector<void*>& bases(std::size_t index) const = 0;
};

/// All functions marked collective are called by all processes in the same order; a failure on one is thrown on all.
/// The ranks of one process are driven from one host thread.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return size_; }                              ///< ranks of all processes
  const std::vector<LocalRank>& local() const { return local_; }  ///< ascending and without gaps
  /// Ranks, of all processes, on the GPU of local()[index], itself included.
  int ranks_on_device(std::size_t index) const { return ranks_on_device_[index]; }
  ProcessGroup& processes() const { return *processes_; }

  /// Collective. `bytes` of device memory a rank, uninitialised, aligned to 256 bytes. The result must be destroyed
  /// before the communicator, on all processes. Throws Error when memory runs out, InputError naming all pairs of ranks
  /// that cannot reach each other.
  virtual std::unique_ptr<SharedMemory> allocate(std::int64_t bytes) = 0;

 protected:
  Communicator() = default;
  /// Collective: fills in what the accessors above return. Ranks are numbered process by process.
  void describe(std::span<const int> devices, std::shared_ptr<ProcessGroup> processes);

 private:
  int size_ = 0;
  std::vector<LocalRank> local_;
  std::vector<int> ranks_on_device_;
  std::shared_ptr<ProcessGroup> processes_;
};

/// One process drives all ranks: rank r runs on devices[r]; several ranks may share a device. Switches peer access on
/// between all devices. Throws InputError when there are no devices, one does not exist or has more than
/// kMaxRanksPerDevice ranks, or when some pairs of devices have no peer access; these are all listed.
std::shared_ptr<Communicator> in_process(std::span<const int> devices);

/// Several processes of one host, each with one rank or more: rank numbers follow the process numbers, and within a
/// process `devices` (of this process). Memory is shared through CUDA IPC handles. Collective. Processes whose ranks
/// share a GPU need the Multi-Process Service to run at the same time. Throws InputError as in_process does, and when
/// the processes are on different hosts.
std::shared_ptr<Communicator> across_processes(std::shared_ptr<ProcessGroup> processes, std::span<const int> devices);

/// A rank of this process whose peers' memory the caller already reaches, for instance through symmetric memory of
/// PyTorch.
struct AdoptedRank {
  int device = 0;
  std::vector<void*>
      bases;  ///< [size] memory of every rank as seen from `device`, its own among them, 256-byte aligned
};

/// The caller's memory, `bytes` for each rank: at least CudaLayer::shared_bytes(). It stays the caller's and must
/// outlive the communicator. It carries one layer at a time. `processes`: null when this process has all ranks.
/// Collective. Throws InputError when sizes or alignment do not fit.
std::shared_ptr<Communicator> adopt_memory(std::span<const AdoptedRank> ranks, std::int64_t bytes,
                                           std::shared_ptr<ProcessGroup> processes);

}  // namespace moewave
