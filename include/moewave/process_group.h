// Processes of one job that agree on something before their GPUs do: who is there, addresses, success or failure.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moewave {

/// Where this process stands in its job and how the processes meet.
struct ProcessGroupOptions {
  int process = 0;                    ///< number of this process, 0 to processes - 1
  int processes = 1;                  ///< of the job
  std::string address = "127.0.0.1";  ///< host name or address of process 0
  int port = 29500;                   ///< TCP port on which process 0 listens, 1 to 65535
  std::int64_t timeout_ms = 120'000;  ///< for meeting, and for every exchange after it; at least 1
};

/// Reads the environment of a launcher: RANK, WORLD_SIZE (torchrun, or set by hand), else OMPI_COMM_WORLD_RANK and
/// OMPI_COMM_WORLD_SIZE (mpirun of Open MPI), else PMI_RANK and PMI_SIZE (other MPIs); none of them: one process alone.
/// MASTER_ADDR and MASTER_PORT are used where they are set. Where torchrun's own store listens on that port
/// (TORCHELASTIC_USE_AGENT_STORE=True) the next port is taken. Throws InputError naming a variable that is missing or
/// is no number in its range.
ProcessGroupOptions process_group_from_environment();

/// Number of this process among those on its host: LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or MPI_LOCALRANKID, else 0.
int local_process_from_environment();

/// Every function is collective: all processes call the same ones in the same order. Not thread-safe. After an
/// exception the group is closed: all later calls fail at once, here and at the other processes.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  virtual int process() const = 0;
  virtual int processes() const = 0;

  /// Every process's bytes, by process number. Throws Error naming the process that did not answer in time, left, or
  /// called something else.
  virtual std::vector<std::string> all_gather(std::string_view bytes) = 0;

  void barrier() { all_gather({}); }
};

/// Meets the other processes over TCP; process 0 listens. Later traffic is small: addresses and texts, no tensors. The
/// connections are not encrypted and are meant for the private network of a job. Throws InputError for options that
/// cannot be or that the processes do not agree on, Error when they do not all come in time.
std::shared_ptr<ProcessGroup> join_process_group(const ProcessGroupOptions& options);

}  // namespace moewave
