// Entry: stage what peers will read, tell them, wait for them, build the schedule and the list of tasks.
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "moewave/config.h"
#include "protocol/tasks.h"
#include "ptx/copies.cuh"

namespace moewave::sm90 {

/// What entry and schedule keep in shared memory, where the consumers' staging buffers lie later.
struct EntryMemory {
  std::int32_t tokens_per_rank[kMaxRanks];
  protocol::PlaceScratch places[kWarps];
  protocol::EntryDecision decision;
};
static_assert(sizeof(EntryMemory) <= sizeof(BlockMemory::staging));

/// Barrier of the rank's blocks. Staging is its first round, for which only block 0 waits.
class GridRounds {
 public:
  __device__ __forceinline__ void arrive(const Call& call) {
    ++round_;
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release_gpu(call.counter(call.params.layout.counters.arrived), 1);
  }
  /// By one thread.
  __device__ __forceinline__ bool wait(const Call& call, Wait what, std::uint64_t limit_ns) const {
    return call.wait<Scope::kGpu>(call.counter(call.params.layout.counters.arrived), round_ * gridDim.x, what,
                                  limit_ns);
  }
  /// By all threads; false on all of them.
  __device__ __forceinline__ bool arrive_and_wait(const Call& call, Role role) {
    arrive(call);
    const bool arrived =
        threadIdx.x != 0 || wait(call, {role, Awaited::kGridBarrier, round_}, call.params.pipeline_limit_ns);
    return __syncthreads_and(arrived ? 1 : 0) != 0;
  }

 private:
  std::uint32_t round_ = 0;
};

// This thread's items of a list that all threads of the rank share.
template <typename Function>
__device__ __forceinline__ void for_each_item(std::int64_t count, Function&& function) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{ptx::block_index()} * kThreads + threadIdx.x; i < count; i += stride) function(i);
}

// Ids are tested before they are narrowed: what does not fit becomes another id that is out of range.
__device__ __forceinline__ std::int32_t narrow_id(std::int64_t id) {
  return id < -1 || id > kMaxExperts ? static_cast<std::int32_t>(kMaxExperts) : static_cast<std::int32_t>(id);
}

__device__ __forceinline__ void stage_routes(const Call& call) {
  const ForwardParams& p = call.params;
  std::int32_t* ids = call.own_shared(p.layout.shared.ids);
  float* weights = call.own_shared(p.layout.shared.weights);
  for_each_item(p.tokens * call.geometry().topk, [&](std::int64_t i) {
    ids[i] = p.ids_are_64_bit ? narrow_id(static_cast<const std::int64_t*>(p.topk_ids)[i])
                              : static_cast<const std::int32_t*>(p.topk_ids)[i];
    weights[i] = p.topk_weights[i];
  });
}

// Produces: the rank's card and its flag at every peer. Consumer: every block of every rank.
__device__ __forceinline__ void announce(const Call& call) {
  const ForwardParams& p = call.params;
  protocol::EntryHeader header{};
  header.epoch = call.epoch;
  header.direction = protocol::kForward;
  header.refused = p.tokens > call.geometry().max_tokens ? 1 : 0;
  header.tokens = p.tokens;
  header.topk = call.geometry().topk;
  header.configuration = p.configuration;
  for (int peer = static_cast<int>(threadIdx.x); peer < call.ranks(); peer += kWarp) {
    call.shared_of(peer, p.layout.shared.headers)[(call.epoch & 1u) * call.ranks() + call.rank()] = header;
    ptx::store_release_system(call.shared_of(peer, p.layout.shared.ids_flags) + call.rank(), call.epoch);
  }
}

/// Stages x while the schedule is built, whose phases mostly wait for one another: before each barrier every warp
/// stores the piece that has arrived in its buffer and asks for its next one.
class XStager {
 public:
  __device__ __forceinline__ XStager(const Call& call, BlockMemory& memory) : call_(call) {
    const std::int64_t warp = threadIdx.x / kWarp;
    buffer_ = ptx::shared_address(memory.dispatch[warp]);
    barrier_ = ptx::shared_address(&memory.staged[warp]);
    next_ = (warp * gridDim.x + ptx::block_index()) * kDispatchBytes;
    end_ = call.ranks() > 1 ? call.params.tokens * call.geometry().hidden * 2 : 0;
    if (is_mover()) load();
  }

  __device__ __forceinline__ void pump() {
    if (!is_mover() || !is_loading()) return;
    store();
    ptx::wait_bulk_stores_read();
    load();
  }

  /// Instead of finish, when the call ends here: nothing may arrive in the block's memory after its end.
  __device__ __forceinline__ void drain() {
    if (!is_mover()) return;
    if (is_loading()) store();
    ptx::wait_bulk_stores_done();
  }

  /// By all threads. Waits for: all blocks' parts. Produces: the x flags at every peer. Consumer: dispatch.
  __device__ __forceinline__ void finish() {
    if (is_mover()) {
      while (is_loading()) pump();
      ptx::wait_bulk_stores_done();
      ptx::fence_proxy_async();
    }
    __syncthreads();
    if (call_.ranks() == 1 || threadIdx.x >= kWarp) return;
    const protocol::SharedLayout& shared = call_.params.layout.shared;
    bool is_last = false;
    if (threadIdx.x == 0) {
      is_last = ptx::fetch_add_acq_rel_gpu(call_.counter(call_.params.layout.counters.staged), 1) == gridDim.x - 1;
    }
    if (__shfl_sync(0xffffffffu, is_last ? 1 : 0, 0) == 0) return;
    __syncwarp();  // hands on to the other lanes what the first one acquired
    for (int peer = static_cast<int>(threadIdx.x); peer < call_.ranks(); peer += kWarp) {
      ptx::store_release_system(call_.shared_of(peer, shared.x_flags) + call_.rank(), call_.epoch);
    }
  }

 private:
  __device__ __forceinline__ static bool is_mover() { return threadIdx.x % kWarp == 0; }
  __device__ __forceinline__ bool is_loading() const { return bytes_ != 0; }

  __device__ __forceinline__ void load() {
    current_ = next_;
    bytes_ = next_ < end_ ? static_cast<std::uint32_t>(protocol::min64(kDispatchBytes, end_ - next_)) : 0;
    next_ += std::int64_t{kWarps} * gridDim.x * kDispatchBytes;
    if (bytes_ == 0) return;
    ptx::arrive_expecting(barrier_, bytes_);
    ptx::bulk_load(buffer_, reinterpret_cast<const char*>(call_.params.x) + current_, bytes_, barrier_);
  }
  __device__ __forceinline__ void store() {
    wait_phase(barrier_, parity_, call_.params.pipeline_limit_ns);
    parity_ ^= 1u;
    char* staged = reinterpret_cast<char*>(call_.own_shared(call_.params.layout.shared.x));
    ptx::bulk_store(staged + current_, buffer_, bytes_);
    ptx::commit_bulk_stores();
  }

  const Call& call_;
  std::uint32_t buffer_;
  std::uint32_t barrier_;
  std::uint32_t parity_ = 0;
  std::uint32_t bytes_ = 0;   // under way
  std::int64_t current_ = 0;  // where they lie in x
  std::int64_t next_;
  std::int64_t end_;
};

/// All threads of a warp: waits for one flag of every rank.
__device__ __forceinline__ bool wait_for_ranks(const Call& call, const std::uint32_t* flags, Role role, Awaited what,
                                               std::uint64_t limit_ns) {
  bool came = true;
  for (int source = static_cast<int>(threadIdx.x) % kWarp; source < call.ranks(); source += kWarp) {
    came = came && call.wait<Scope::kSystem>(flags + source, call.epoch,
                                             {role, what, static_cast<std::uint32_t>(source)}, limit_ns);
  }
  const bool all_came = __all_sync(0xffffffffu, came ? 1 : 0) != 0;
  __syncwarp();  // hands on to every lane what the others acquired: votes order nothing
  return all_came;
}

enum class Entered { kGo, kAbandoned, kStopped };

/// Waits for: ids of all ranks. Produces: staged ids and weights, the card and the flag for them; counters of the next
/// call cleared.
__device__ __forceinline__ Entered enter(const Call& call, EntryMemory& memory, GridRounds& rounds) {
  const ForwardParams& p = call.params;
  const bool fits = p.tokens <= call.geometry().max_tokens;
  call.jitter(0);
  for_each_item(p.layout.counters.size, [&](std::int64_t i) { *call.other_counter(i) = 0; });
  if (fits) stage_routes(call);
  if (ptx::block_index() == 0 && threadIdx.x == 0) call.schedule().totals->bad_route = protocol::kNoBadRoute;
  rounds.arrive(call);
  bool came = true;
  if (ptx::block_index() == 0 && threadIdx.x < kWarp) {
    came = threadIdx.x != 0 || rounds.wait(call, {Role::kEntry, Awaited::kStagedIds, 0}, p.pipeline_limit_ns);
    came = __all_sync(0xffffffffu, came ? 1 : 0) != 0;
    __syncwarp();  // hands on to the other lanes what the first one acquired
    if (came) announce(call);
  }
  call.jitter(1);

  const protocol::EntryHeader* headers = call.own_shared(p.layout.shared.headers) + (call.epoch & 1u) * call.ranks();
  if (threadIdx.x < kWarp) {
    came = came && wait_for_ranks(call, call.own_shared(p.layout.shared.ids_flags), Role::kEntry, Awaited::kIdsFlag,
                                  p.entry_limit_ns);
    for (int source = static_cast<int>(threadIdx.x); came && source < call.ranks(); source += kWarp) {
      memory.tokens_per_rank[source] = static_cast<std::int32_t>(headers[source].tokens);
    }
    if (came && threadIdx.x == 0) memory.decision = protocol::judge_entry(headers, call.ranks());
  }
  if (__syncthreads_and(came ? 1 : 0) == 0) return Entered::kStopped;
  return memory.decision.verdict == protocol::EntryVerdict::kGo ? Entered::kGo : Entered::kAbandoned;
}

/// A call that all ranks leave with the same verdict: the epoch goes on, nothing else was touched.
__device__ __forceinline__ void abandon(const Call& call, const EntryMemory& memory) {
  const ForwardParams& p = call.params;
  if (threadIdx.x != 0) return;
  if (ptx::fetch_add_acq_rel_gpu(call.counter(p.layout.counters.finished), 1) != gridDim.x - 1) return;
  const protocol::Schedule schedule = call.schedule();
  *schedule.totals = {};
  schedule.totals->bad_route = protocol::kNoBadRoute;
  schedule.macrobatches[0] = {};
  schedule.minibatches[0] = {};
  *call.workspace(p.layout.workspace.epoch) = call.epoch;
  HostWords& host = *p.host;
  if (host.has_verdict != 0) return;
  const int rank = memory.decision.rank;
  const protocol::EntryHeader* headers = call.own_shared(p.layout.shared.headers) + (call.epoch & 1u) * call.ranks();
  host.verdict_epoch = call.epoch;
  host.verdict = static_cast<std::uint32_t>(memory.decision.verdict);
  host.verdict_rank = rank;
  host.verdict_tokens = headers[rank].tokens;
  ptx::store_release_system(&host.has_verdict, 1);
}

// What the kernel needs of a task, looked up once.
__device__ __forceinline__ protocol::TaskRecord describe(const protocol::Geometry& geometry,
                                                         const protocol::Schedule& schedule, std::int64_t tokens,
                                                         const protocol::Task& task) {
  protocol::TaskRecord record{};
  record.kind = static_cast<std::int32_t>(task.kind);
  record.tile = task.tile;
  record.column = task.column;
  record.minibatch = task.minibatch;
  if (task.minibatch < 0) {
    record.rows = static_cast<std::int32_t>(
        protocol::min64(protocol::kTileRows, tokens - std::int64_t{task.tile} * protocol::kTileRows));
    record.hidden_place = task.tile;
    return record;
  }
  const protocol::Tile tile = schedule.tiles[task.tile];
  record.rows = tile.rows;
  record.expert = tile.expert;
  record.macrobatch = tile.macrobatch;
  record.hidden_place = (task.minibatch % protocol::kHiddenSlots) * geometry.minibatch_tiles + task.tile -
                        schedule.minibatches[task.minibatch].tile_begin;
  return record;
}

/// Waits for: entry. Produces: schedule and task list, staged x. Consumers: all roles.
__device__ __forceinline__ bool make_schedule(const Call& call, EntryMemory& memory, GridRounds& rounds,
                                              XStager& stager) {
  const ForwardParams& p = call.params;
  const protocol::Geometry& geometry = call.geometry();
  const protocol::Schedule schedule = call.schedule();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  // Neighbouring workers sit on different SMs: the first workers get the odd block of the token order.
  const int worker = warp * static_cast<int>(gridDim.x) + static_cast<int>(ptx::block_index());
  const int workers = kWarps * static_cast<int>(gridDim.x);
  const protocol::ScheduleTask task{geometry, call.rank(), memory.tokens_per_rank, schedule,
                                    p.layout.workspace.scratch(p.workspace)};
  call.jitter(2);
  const bool built = protocol::build_schedule<protocol::WarpLanes>(
      task, worker, workers, memory.places[warp],
      [&](int source) -> const std::int32_t* { return call.shared_of(source, p.layout.shared.ids); },
      [&] {
        stager.pump();
        return rounds.arrive_and_wait(call, Role::kSchedule);
      });
  if (!built) {
    stager.drain();
    return false;
  }

  const protocol::TaskOrder order(geometry, schedule, static_cast<std::int32_t>(p.tokens), false);
  const std::int64_t count = order.size();
  protocol::TaskRecord* tasks = call.workspace(p.layout.workspace.tasks);
  for_each_item(count, [&](std::int64_t i) { tasks[i] = describe(geometry, schedule, p.tokens, order.task(i)); });
  if (ptx::block_index() == 0) {
    std::int32_t* kept = p.layout.context.tokens_per_rank.at(p.context);
    for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks(); rank += kThreads) {
      kept[rank] = memory.tokens_per_rank[rank];
    }
    if (threadIdx.x == 0) *call.workspace(p.layout.workspace.task_count) = static_cast<std::uint32_t>(count);
  }
  stager.finish();
  return rounds.arrive_and_wait(call, Role::kSchedule);
}

}  // namespace moewave::sm90
