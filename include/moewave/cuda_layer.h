// The layer on GPUs: one kernel launch a call and rank, from raw expert ids to the merged output.
//
// For Hopper (compute capability 9.0). Forward only, BF16. Pointers are to device memory unless said otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "moewave/bf16.h"
#include "moewave/communicator.h"
#include "moewave/config.h"
#include "moewave/host_layer.h"

struct CUstream_st;  // CUDA's own declaration: cudaStream_t is a pointer to it

namespace moewave {

using CudaStream = CUstream_st*;

struct CudaLayerOptions {
  std::int64_t entry_timeout_ms = 120'000;    ///< waiting for peers to enter a call
  std::int64_t pipeline_timeout_ms = 10'000;  ///< every other wait
  std::int64_t timeline_events = 0;  ///< events that a block keeps of the last call, for timeline(); 0: no timeline

  // Test hooks.
  std::uint32_t first_epoch = 0;  ///< epochs count from here, modulo 2^32
  std::uint32_t jitter_ns = 0;    ///< random delays up to this before phases and tasks
  bool poison = false;            ///< fills all scratch memory and own slots with NaN patterns before each call
};

/// One rank's weights, BF16, row-major, 16-byte aligned, owned by the caller. E_local experts lie in the order of
/// local_experts(). Either `gate_up`, or both `gate` and `up`.
struct DeviceWeights {
  const Bf16* gate_up = nullptr;      ///< [E_local, 2I, H], the I gate rows first
  const Bf16* gate = nullptr;         ///< [E_local, I, H]
  const Bf16* up = nullptr;           ///< [E_local, I, H]
  const Bf16* down = nullptr;         ///< [E_local, H, I]
  const Bf16* shared_gate = nullptr;  ///< [S, H], with a shared expert
  const Bf16* shared_up = nullptr;    ///< [S, H]
  const Bf16* shared_down = nullptr;  ///< [H, S]
};

/// Addresses of one rank's weights in the form that the kernel takes. The values may change between calls, the
/// addresses may not. Does not own the weights. Belongs to the rank of the layer that made it.
class WeightMaps {
 public:
  WeightMaps();
  ~WeightMaps();
  WeightMaps(WeightMaps&&) noexcept;
  WeightMaps& operator=(WeightMaps&&) noexcept;

 private:
  friend class CudaLayer;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

enum class IdType { kInt32, kInt64 };

/// One rank's inputs of a call. They must stay as they are until the call has ended on its stream.
struct DeviceInputs {
  const Bf16* hidden_states = nullptr;  ///< [tokens, H], 16-byte aligned
  const void* topk_ids = nullptr;       ///< [tokens, k]; -1: the route does not exist; an id twice counts twice
  IdType id_type = IdType::kInt32;
  const float* topk_weights = nullptr;  ///< [tokens, k]
  std::int64_t tokens = 0;              ///< >= 0; with more than max_tokens all ranks refuse the call, see check()
};

/// Bytes of device memory a rank.
struct CudaLayerBytes {
  std::int64_t shared = 0;     ///< that peers reach
  std::int64_t workspace = 0;  ///< scratch
  std::int64_t context = 0;    ///< the schedule
  std::int64_t timeline = 0;   ///< with timeline_events
  std::int64_t sum() const { return shared + workspace + context + timeline; }
};

/// All ranks of a process, driven from one host thread. Functions take the place of a rank among those of its process:
/// `index` is 0 to local().size() - 1 of the communicator. A collective function is called by all processes in the same
/// order, and its failure is thrown on all of them.
///
/// A call is one forward() of every rank, of all processes. Within a process all ranks' forward() of a call must be
/// enqueued before the host waits for any of them, and each on another stream (stream() has one), since ranks wait for
/// each other on the GPU. The calls of one rank must follow one another in stream order; their order is the same on all
/// ranks. Any number of calls may be enqueued without waiting.
class CudaLayer {
 public:
  /// Collective. Allocates everything that calls need and loads the kernel; nothing is allocated later. `max_tokens`:
  /// of one rank and call. Throws InputError for a shape, tuning, device or SM count that cannot be, or that the
  /// processes do not agree on; Error when memory runs out.
  CudaLayer(const LayerShape& shape, std::shared_ptr<Communicator> communicator, std::int64_t max_tokens,
            const Tuning& tuning = {}, const CudaLayerOptions& options = {});
  /// Collective with several processes. Waits for the GPUs.
  ~CudaLayer();
  CudaLayer(const CudaLayer&) = delete;
  CudaLayer& operator=(const CudaLayer&) = delete;

  /// Collective. What the constructor would take. Takes nothing.
  static CudaLayerBytes required_bytes(const LayerShape& shape, const Communicator& communicator,
                                       std::int64_t max_tokens, const Tuning& tuning = {},
                                       const CudaLayerOptions& options = {});
  /// The part that peers reach, for adopt_memory(). Needs neither a communicator nor a GPU.
  static std::int64_t shared_bytes(const LayerShape& shape, int ranks, std::int64_t max_tokens);

  /// To be called once for each set of weights. Throws InputError for a missing or misaligned pointer.
  WeightMaps map_weights(std::size_t index, const DeviceWeights& weights) const;

  /// Enqueues the rank's part of a call: one kernel launch (with poison or timeline also clears of memory), which can
  /// be captured into a CUDA graph. No allocation, no wait. `output`: [tokens, H], 16-byte aligned, not overlapping an
  /// input. Throws InputError for a missing or misaligned pointer, Error when the launch fails or recover() is due.
  /// What goes wrong on the GPU is thrown by check().
  void forward(std::size_t index, const WeightMaps& weights, const DeviceInputs& inputs, Bf16* output,
               CudaStream stream);

  /// A stream of the layer for this rank, not synchronised with the default stream.
  CudaStream stream(std::size_t index) const;

  /// Waits for the streams that calls were enqueued on since the last check (they must still exist; graphs that are
  /// replayed elsewhere are the caller's to wait for), then throws what went wrong in this or any earlier call:
  /// - TimeoutError: a wait ran past its limit; all ranks stopped. recover() must follow.
  /// - InputError: a rank had more than max_tokens tokens (no rank computed anything), or a route had an expert id
  ///   outside -1..E-1 (taken as -1; the call's results are invalid). The layer goes on with the next call.
  /// - Error: ranks disagreed on epoch or configuration (no rank computed anything).
  void check();

  /// Collective. Waits for the GPUs, clears counters, flags and failures, and starts a new range of epochs.
  void recover();

  /// Of the last call, which must have ended: what this process's ranks did, read from their GPUs. Entries of other
  /// processes' ranks are zero. RankStats::seconds stays 0.
  CallReport report() const;

  /// Of the last call, which must have ended: with CudaLayerOptions::timeline_events. Times since the earliest event of
  /// this process's ranks. What the producer waited for has track 1, all else track 0. Events beyond the limit are
  /// missing.
  std::vector<TimelineEvent> timeline() const;

  const LayerShape& shape() const;
  const Tuning& tuning() const;  ///< the values in use, rounded
  std::int64_t max_tokens() const;
  const Communicator& communicator() const;
  const CudaLayerBytes& bytes() const;
  std::int64_t workspace_bytes() const { return bytes().sum(); }  ///< of one rank

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moewave
