// What one rank has on its GPU besides the memory that peers reach.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/sm90/host_words.h"
#include "kernels/sm90/trace.h"
#include "layer/call_report.h"
#include "moewave/communicator.h"
#include "protocol/layout.h"
#include "transport/cuda_check.h"

namespace moewave {

class CudaRank {
 public:
  /// Allocates. `timeline_events` of each block and track; 0: none.
  CudaRank(const LocalRank& place, const protocol::Layout& layout, const std::vector<void*>& bases, int blocks,
           std::int64_t timeline_events);
  ~CudaRank();
  CudaRank(const CudaRank&) = delete;
  CudaRank& operator=(const CudaRank&) = delete;

  static std::int64_t timeline_bytes(int blocks, std::int64_t timeline_events);

  int rank() const { return place_.rank; }
  int device() const { return place_.device; }
  cudaStream_t stream() const { return stream_; }
  void* shared() const { return shared_; }
  void* workspace() const { return workspace_.get(); }
  void* context() const { return context_.get(); }
  protocol::PointerTable peers(int size) const { return {rank(), size, static_cast<void* const*>(table_.get())}; }
  sm90::HostWords& words() const { return *words_; }
  sm90::HostWords* words_on_device() const { return words_on_device_; }
  const sm90::Trace& trace() const { return trace_; }

  /// The epoch of the last call, and whether some rank gave up. These wait for the GPU.
  std::uint32_t epoch() const;
  bool is_stopped() const;

  /// Flags, counters, epoch and host words as if `epoch` had just ended well.
  void reset(std::uint32_t epoch);

  /// Enqueued: NaN patterns in everything that a call writes before it reads it; no events.
  void poison(cudaStream_t stream) const;
  void clear_timeline(cudaStream_t stream) const;

  /// Of the last call, which had `tokens` tokens.
  RankStats report(std::int64_t tokens, CallReport& report) const;
  std::vector<TimelineEvent> timeline() const;  // times as the GPU tells them

 private:
  template <typename T>
  void fill(void* base, const protocol::Place<T>& place, T value);

  LocalRank place_;
  const protocol::Layout& layout_;
  int blocks_;
  void* shared_;
  DeviceMemory workspace_;
  DeviceMemory context_;
  DeviceMemory table_;         // [ranks] bases
  DeviceMemory trace_memory_;  // counts, then events
  sm90::Trace trace_{};
  sm90::HostWords* words_ = nullptr;
  sm90::HostWords* words_on_device_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace moewave
