// One emulated streaming multiprocessor: a thread of a rank, with bounded waits, counters and its timeline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cpu/logical_time.h"
#include "cpu/rank_memory.h"
#include "cpu/tile_product.h"
#include "protocol/layout.h"
#include "protocol/tasks.h"

namespace moewave::cpu {

/// Thrown inside an SM thread when its rank or a peer gave up; never leaves the emulator.
struct Stopped {};

/// What all ranks of a run share besides the pointer table: it stands for the hosts, not for the GPUs.
struct RunState {
  std::chrono::steady_clock::time_point start;
  std::mutex mutex;
  std::optional<WaitRecord> record;              // of the first SM that gave up
  std::exception_ptr failure;                    // anything else that went wrong in a thread
  std::vector<protocol::EntryVerdict> verdicts;  // [calls]
  std::vector<int> verdict_ranks;                // [calls] the rank it is about
  std::unique_ptr<LogicalTime> time;             // while a timeline is recorded
  std::vector<std::int64_t> bad_routes;          // [calls] lowest bad route, kNoBadRoute if none
};

class Sm {
 public:
  Sm(const protocol::Layout& layout, const EmulatorOptions& options, const LayerShape& shape, const Tuning& tuning,
     protocol::PointerTable peers, RankMemory& memory, RunState& run, int sm);

  // ---- identity
  int rank() const { return peers.rank; }
  bool communicates() const { return index < tuning.comm_sms; }
  protocol::ScheduleTask schedule_task() const;
  template <typename T>
  T* shared_of(int peer, const protocol::Place<T>& place) const {
    return place.at(peers.base[peer]);
  }
  template <typename T>
  T* own_shared(const protocol::Place<T>& place) const {
    return shared_of(peers.rank, place);
  }
  template <typename T>
  T* own_workspace(const protocol::Place<T>& place) const {
    return place.at(memory.workspace.get());
  }
  std::uint32_t* counter(std::int64_t number) const;
  std::uint32_t* other_counters() const;

  // ---- synchronisation
  void add(std::int64_t counter_number, std::uint32_t value = 1);  // release
  void raise(std::uint32_t* flag, std::uint32_t epoch_value);      // release; any rank's memory
  /// Waits until `word` reaches `wanted` (acquire). Throws Stopped after the limit, and when a peer has given up.
  void wait(const std::uint32_t* word, std::uint32_t wanted, const char* phase, const char* name, std::int64_t number);
  void wait_counter(std::int64_t counter_number, std::int64_t wanted, const char* phase, std::int64_t number);
  /// Barrier of this rank's SMs within a call.
  void barrier(const char* phase);
  /// The boundary between two launches on a stream. Not a counter of the kernel: those are cleared by the next call.
  void launch_boundary();

  // ---- timeline and jitter
  /// Logical time while a timeline is recorded, 0 otherwise.
  std::int64_t now_ns();
  std::int64_t wall_ns() const;  // since the run began
  /// Holds this SM back until it is its turn in logical time to draw a ticket.
  void wait_for_turn();
  void leave_turns();
  void record(const char* name, std::int64_t begin_ns, std::int64_t number, std::int64_t minibatch = -1);
  void jitter();       // before a phase: often
  void task_jitter();  // before a task: rarely

  const protocol::Layout& layout;
  const EmulatorOptions& options;
  const LayerShape& shape;
  const Tuning& tuning;
  const protocol::PointerTable peers;
  RankMemory& memory;
  RunState& run;
  const int index;

  // ---- of the current call
  const RankCall* call = nullptr;
  int call_number = 0;
  std::uint32_t epoch = 0;
  const char* role = "host";
  protocol::Schedule schedule{};
  std::vector<std::int32_t> tokens_per_rank;
  std::int32_t watermark = 0;         // minibatches whose pulls this SM has seen done
  std::int32_t hidden_watermark = 0;  // minibatches whose down tasks it has seen done
  bool x_is_staged = false;
  std::uint32_t barriers = 0;

  TileProduct product;
  std::vector<TimelineEvent> events;

 private:
  [[noreturn]] void give_up(const char* phase, const char* name, std::int64_t number, std::uint32_t wanted,
                            std::uint32_t seen);

  void raise_stamp(const std::uint32_t* word);
  void end_wait(const std::uint32_t* word, std::int64_t began, std::int64_t number);

  std::minstd_rand random_;
  bool takes_turns_ = false;
  std::int64_t clock_ns_ = 0;    // logical time up to thread_ns_
  std::int64_t thread_ns_ = -1;  // processor time of this thread when clock_ns_ was set, -1: not yet
};

/// The roles, in the order in which a kernel plays them.
bool enter(Sm& sm);           // entry.cpp: staging, flags, verdict; false: abandon the call
void abandon(Sm& sm);         // exit.cpp: the epoch goes on, nothing else was touched
void build_schedule(Sm& sm);  // entry.cpp
void dispatch(Sm& sm);        // dispatch.cpp: pulls token rows into the ring
void run_tasks(Sm& sm);       // tasks.cpp: takes tickets, runs forward or backward tasks
void leave(Sm& sm);           // exit.cpp: exit flags
void merge(Sm& sm);           // exit.cpp: weighted sum of own tokens
void finish(Sm& sm);          // exit.cpp: epoch, statistics

void run_forward_task(Sm& sm, const protocol::TaskOrder& order, const protocol::Task& task);
void run_backward_task(Sm& sm, const protocol::TaskOrder& order, const protocol::Task& task);

}  // namespace moewave::cpu
