#include "layer/cuda_rank.h"

#include <algorithm>
#include <string>

#include "layer/scratch_places.h"

namespace moewave {
namespace {

std::int64_t counts_bytes(int blocks) {
  return protocol::round_up(
      std::int64_t{blocks} * sm90::kTraceTracks * static_cast<std::int64_t>(sizeof(std::uint32_t)),
      protocol::kAlignment);
}

template <typename T>
std::vector<T> to_host(const T* from, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (count > 0)
    check_cuda(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return values;
}

}  // namespace

std::int64_t CudaRank::timeline_bytes(int blocks, std::int64_t timeline_events) {
  if (timeline_events == 0) return 0;
  return counts_bytes(blocks) + std::int64_t{blocks} * sm90::kTraceTracks * timeline_events *
                                    static_cast<std::int64_t>(sizeof(sm90::TraceEvent));
}

CudaRank::CudaRank(const LocalRank& place, const protocol::Layout& layout, const std::vector<void*>& bases, int blocks,
                   std::int64_t timeline_events)
    : place_(place), layout_(layout), blocks_(blocks), shared_(bases[static_cast<std::size_t>(place.rank)]) {
  const std::string of_rank = " of rank " + std::to_string(place.rank);
  workspace_ = allocate_on(device(), layout.workspace.bytes, "workspace" + of_rank);
  context_ = allocate_on(device(), layout.context.bytes, "context" + of_rank);
  table_ = allocate_on(device(), static_cast<std::int64_t>(bases.size() * sizeof(void*)), "pointer table" + of_rank);
  const DeviceGuard guard(device());
  check_cuda(cudaMemcpy(table_.get(), bases.data(), bases.size() * sizeof(void*), cudaMemcpyDefault), "cudaMemcpy");
  if (timeline_events > 0) {
    trace_memory_ = allocate_on(device(), timeline_bytes(blocks, timeline_events), "timeline" + of_rank);
    trace_.counts = static_cast<std::uint32_t*>(trace_memory_.get());
    trace_.events = reinterpret_cast<sm90::TraceEvent*>(static_cast<char*>(trace_memory_.get()) + counts_bytes(blocks));
    trace_.capacity = static_cast<std::uint32_t>(timeline_events);
    check_cuda(cudaMemset(trace_.counts, 0, static_cast<std::size_t>(counts_bytes(blocks))), "cudaMemset");
  }
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  void* words = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&words, sizeof(sm90::HostWords), cudaHostAllocMapped | cudaHostAllocPortable);
  if (status == cudaSuccess) {
    words_ = new (words) sm90::HostWords{};
    void* on_device = nullptr;
    check_cuda(cudaHostGetDevicePointer(&on_device, words, 0), "cudaHostGetDevicePointer");
    words_on_device_ = static_cast<sm90::HostWords*>(on_device);
  }
  check_cuda(status, "cudaHostAlloc");
}

CudaRank::~CudaRank() {
  if (words_ != nullptr) cudaFreeHost(words_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::uint32_t CudaRank::epoch() const { return to_host(layout_.workspace.epoch.at(workspace()), 1)[0]; }
bool CudaRank::is_stopped() const { return to_host(layout_.shared.abort.at(shared_), 1)[0] != 0; }

template <typename T>
void CudaRank::fill(void* base, const protocol::Place<T>& place, T value) {
  const std::vector<T> values(static_cast<std::size_t>(place.count), value);
  check_cuda(cudaMemcpy(place.at(base), values.data(), values.size() * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
}

void CudaRank::reset(std::uint32_t epoch) {
  const DeviceGuard guard(device());
  fill(shared_, layout_.shared.ids_flags, epoch);
  fill(shared_, layout_.shared.x_flags, epoch);
  fill(shared_, layout_.shared.exit_flags, epoch);
  fill(shared_, layout_.shared.abort, 0u);
  fill(workspace(), layout_.workspace.epoch, epoch);
  fill(workspace(), layout_.workspace.counters, 0u);
  // A report before the first call finds an empty schedule.
  fill(context(), layout_.context.totals, protocol::ScheduleTotals{});
  *words_ = {};
  check_cuda(cudaDeviceSynchronize(), "reset of rank " + std::to_string(rank()));
}

void CudaRank::poison(cudaStream_t stream) const {
  // In stream order behind the previous call, whose end no peer outruns with reads or pushes (see scratch_places.h).
  const auto fill_place = [&](void* base, const auto& place) {
    if (place.bytes() == 0) return;
    check_cuda(cudaMemsetAsync(place.at(base), kPoisonByte, static_cast<std::size_t>(place.bytes()), stream),
               "cudaMemsetAsync");
  };
  for_each_scratch_place(layout_.workspace, workspace(), fill_place);
  for_each_scratch_place(layout_.shared, shared_, fill_place);
  fill_place(context(), protocol::Place<char>{0, layout_.context.bytes});
}

void CudaRank::clear_timeline(cudaStream_t stream) const {
  if (trace_.events == nullptr) return;
  check_cuda(cudaMemsetAsync(trace_.counts, 0, static_cast<std::size_t>(counts_bytes(blocks_)), stream),
             "cudaMemsetAsync");
}

RankStats CudaRank::report(std::int64_t tokens, CallReport& report) const {
  // Everything before the saved activations.
  const std::vector<char> tables = to_host(static_cast<const char*>(context()), layout_.context.gate_up.offset);
  const bool was_refused = tokens > layout_.geometry.max_tokens;
  const std::int64_t staged = was_refused ? 0 : tokens;
  const auto ids = to_host(layout_.shared.ids.at(shared_), staged * layout_.geometry.topk);
  const protocol::Schedule schedule = layout_.context.schedule(const_cast<char*>(tables.data()));
  RankStats stats = describe_rank({layout_.geometry, rank(), false, staged, ids.data(), schedule}, &report);
  stats.tokens = tokens;
  return stats;
}

std::vector<TimelineEvent> CudaRank::timeline() const {
  std::vector<TimelineEvent> result;
  if (trace_.events == nullptr) return result;
  const int lines = blocks_ * sm90::kTraceTracks;
  const auto counts = to_host(trace_.counts, lines);
  for (int line = 0; line < lines; ++line) {
    const std::uint32_t count = std::min(counts[static_cast<std::size_t>(line)], trace_.capacity);
    for (const sm90::TraceEvent& event : to_host(trace_.events + std::int64_t{line} * trace_.capacity, count)) {
      const auto name = static_cast<std::size_t>(event.name);
      TimelineEvent out;
      out.rank = rank();
      out.sm = line / sm90::kTraceTracks;
      out.track = line % sm90::kTraceTracks;
      out.name = name < static_cast<std::size_t>(sm90::TraceName::kCount) ? sm90::kTraceNames[name] : "unknown";
      out.index = event.index;
      out.minibatch = event.minibatch;
      out.begin_ns = static_cast<std::int64_t>(event.begin_ns);
      out.end_ns = static_cast<std::int64_t>(event.end_ns);
      result.push_back(out);
    }
  }
  return result;
}

}  // namespace moewave
