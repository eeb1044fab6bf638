// The layer on the CPU, all ranks in one process: the FP64 reference and the emulator of the GPU kernels.
//
// Tensors are row-major host memory owned by the caller. N is the sum of tokens_per_rank; the rows of the ranks follow
// one another. Calls are synchronous: results are there, or an exception was thrown, when a function returns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moewave/bf16.h"
#include "moewave/config.h"
#include "moewave/error.h"

namespace moewave {

/// Weights of all experts, BF16.
struct HostWeights {
  std::vector<Bf16> gate_up;      ///< [E, 2I, H], the I gate rows first
  std::vector<Bf16> down;         ///< [E, H, I]
  std::vector<Bf16> shared_gate;  ///< [S, H], empty without a shared expert
  std::vector<Bf16> shared_up;    ///< [S, H]
  std::vector<Bf16> shared_down;  ///< [H, S]
};

/// One call's inputs of all ranks.
struct HostBatch {
  std::vector<std::int64_t> tokens_per_rank;  ///< [R], each >= 0
  std::vector<Bf16> hidden_states;            ///< [N, H]
  std::vector<std::int32_t> topk_ids;         ///< [N, k], -1: the route does not exist; an id twice counts twice
  std::vector<float> topk_weights;            ///< [N, k]
  std::vector<Bf16> grad_output;              ///< [N, H]; needed for backward only

  std::int64_t tokens() const;  ///< N
};

/// How weight gradients are delivered: written (rounded once when kBf16), or added once into what the buffer holds.
enum class GradDtype { kFloat32, kBf16 };
struct GradBuffer {
  std::vector<float> f32;  ///< used when the dtype is kFloat32
  std::vector<Bf16> bf16;  ///< used when the dtype is kBf16
};

/// Results of backward. The caller sets dtype and accumulate; buffers that are to be added to must have their full
/// size, all others are resized. Experts without rows get exact zeros, or an untouched buffer when adding.
struct HostGradients {
  GradDtype weight_grad_dtype = GradDtype::kFloat32;
  bool accumulate = false;

  std::vector<Bf16> hidden_states;  ///< [N, H]
  std::vector<float> topk_weights;  ///< [N, k]; of a masked route: 0
  GradBuffer gate_up;               ///< [E, 2I, H]
  GradBuffer down;                  ///< [E, H, I]
  GradBuffer shared_gate;           ///< [S, H]
  GradBuffer shared_up;             ///< [S, H]
  GradBuffer shared_down;           ///< [H, S]
};

/// Throws InputError naming the first tensor whose size or the first value that does not fit: sizes, negative token
/// counts, ids outside -1..E-1 (with rank, token and slot), a missing grad_output when `backward`.
void validate(const LayerShape& shape, const HostWeights& weights);
void validate(const LayerShape& shape, const HostBatch& batch, bool backward);

/// FP64 results, from BF16 inputs without any intermediate rounding. Independent of the protocol and the emulator.
struct ReferenceResult {
  std::vector<double> output;              ///< [N, H]
  std::vector<double> grad_hidden_states;  ///< [N, H], this and all below only when backward
  std::vector<double> grad_topk_weights;   ///< [N, k]
  std::vector<double> grad_gate_up;        ///< [E, 2I, H]
  std::vector<double> grad_down;           ///< [E, H, I]
  std::vector<double> grad_shared_gate;    ///< [S, H]
  std::vector<double> grad_shared_up;      ///< [S, H]
  std::vector<double> grad_shared_down;    ///< [H, S]
};

/// The reference's place to say how far it is; called from the calling thread with a share in 0..1.
using ProgressFunction = void (*)(double share, void* user);

ReferenceResult run_reference(const LayerShape& shape, const HostWeights& weights, const HostBatch& batch,
                              bool backward, ProgressFunction progress = nullptr, void* user = nullptr);

/// Makes random inputs: weights ~ N(0, 1/fan_in), tokens and grad_output ~ N(0, 1), router weights a softmax over k.
/// Routing: "uniform" (k distinct experts), "zipf:S" (exponent S, experts shuffled), "single:E" (first route to expert
/// E, the other routes uniform over the rest). Throws InputError for anything else. The same seed gives the same bits.
HostWeights random_weights(const LayerShape& shape, std::uint64_t seed);
HostBatch random_batch(const LayerShape& shape, std::span<const std::int64_t> tokens_per_rank,
                       const std::string& routing, std::uint64_t seed, bool with_grad_output);

// ---- Emulator
// ---------------------------------------------------------------------------------------------------------

/// One thing that one emulated SM did. Waits are events of their own. Times are logical: an SM's clock grows by the
/// processor time of its own work, and a wait ends at the clock of whoever ended it, as if each SM had its own
/// processor.
struct TimelineEvent {
  std::int32_t rank = 0;
  std::int32_t sm = 0;
  std::int32_t call = 0;   ///< index into the calls of the run
  const char* name = "";   ///< role or task, for instance "schedule", "pull", "gemm1", "gemm2", "wait", "merge"
  std::int64_t index = 0;  ///< pull batch, tile or block
  std::int64_t minibatch = -1;
  std::int64_t begin_ns = 0;  ///< since the run began
  std::int64_t end_ns = 0;
  std::int32_t track = 0;  ///< an SM that does two things at a time has two tracks
};

/// What one rank did in one call.
struct RankStats {
  std::int64_t tokens = 0;
  std::int64_t routes = 0;         ///< valid routes of this rank's tokens
  std::int64_t rows = 0;           ///< rows that its experts computed
  std::int64_t padded_rows = 0;    ///< the same with padding to whole tiles
  std::int64_t pulled_tokens = 0;  ///< token rows read from peers, each once (per macrobatch; a token lies in one)
  std::int64_t pulled_bytes = 0;
  std::int64_t per_route_bytes = 0;  ///< what pulling a row for every remote route would have read
  std::int64_t pushed_bytes = 0;     ///< combine: rows written to peers
  std::int64_t macrobatches = 0;
  std::int64_t minibatches = 0;
  double seconds = 0;
};

/// What one call did. Matrices are [R, R]: [reader or writer, peer] in bytes, the diagonal being zero.
struct CallReport {
  bool backward = false;
  std::vector<RankStats> ranks;
  std::vector<std::int64_t> pulled_bytes;
  std::vector<std::int64_t> pushed_bytes;
  std::vector<std::int64_t> expert_rows;  ///< [E]
};

struct EmulatorOptions {
  std::uint64_t jitter_seed = 0;  ///< with jitter_us > 0: random delays before phases and tasks
  std::int64_t jitter_us = 0;
  bool poison = false;                     ///< fill all scratch memory and own slots with NaN patterns before each call
  std::int64_t entry_timeout_ms = 60'000;  ///< waiting for peers to enter
  std::int64_t pipeline_timeout_ms = 60'000;  ///< every other wait
  bool timeline = false;
  std::int64_t saved_rows =
      -1;  ///< rows a rank's context can hold; the rest is recomputed in backward. -1: all, 0: none
  std::uint32_t first_epoch = 0;  ///< test hook: epochs count from here, modulo 2^32
};

class EmulatedLayer;
class SavedContextImpl;

/// What forward leaves for backward: the schedule and the saved pre-activations of every rank. Belongs to the layer
/// that wrote it and must not outlive it. Several may be in flight.
class SavedContext {
 public:
  SavedContext();
  ~SavedContext();
  SavedContext(SavedContext&&) noexcept;
  SavedContext& operator=(SavedContext&&) noexcept;
  std::int64_t bytes() const;  ///< of all ranks

 private:
  friend class EmulatedLayer;
  std::unique_ptr<SavedContextImpl> impl_;
};

/// One call of a run. Pointers are borrowed until run() returns.
struct EmulatedCall {
  bool backward = false;
  const HostWeights* weights = nullptr;
  const HostBatch* batch = nullptr;
  SavedContext* context = nullptr;      ///< forward: filled when given; backward: needed
  std::vector<Bf16>* output = nullptr;  ///< [N, H], forward; resized
  HostGradients* gradients = nullptr;   ///< backward
  CallReport* report = nullptr;         ///< filled when given
  int absent_rank = -1;                 ///< test hook: this rank never comes; all others must time out
  int disagreeing_rank = -1;            ///< test hook: this rank enters as if for the other direction; all must refuse
};

/// Emulates the fused kernels: each rank is a set of threads, one a streaming multiprocessor, which play the kernel's
/// roles (entry, schedule, dispatch, expert GEMMs, combine, merge) over real atomics and a table of peer pointers.
class EmulatedLayer {
 public:
  /// Allocates the workspaces of all ranks. Throws InputError for an illegal shape, rank count or tuning.
  EmulatedLayer(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning = {},
                const EmulatorOptions& options = {});
  ~EmulatedLayer();
  EmulatedLayer(const EmulatedLayer&) = delete;
  EmulatedLayer& operator=(const EmulatedLayer&) = delete;

  /// Runs the calls back to back: no barrier between them, a rank may be a call ahead of another. A rank with more than
  /// max_tokens tokens refuses its call; all ranks leave it and InputError is thrown after the run, as for ids out of
  /// range (that call's results are then invalid). TimeoutError: all ranks stopped; recover() before the next run.
  void run(std::span<const EmulatedCall> calls);

  void forward(const HostWeights& weights, const HostBatch& batch, std::vector<Bf16>& output,
               SavedContext* context = nullptr, CallReport* report = nullptr);
  void backward(const HostWeights& weights, const HostBatch& batch, SavedContext& context, HostGradients& gradients,
                CallReport* report = nullptr);

  /// Collective recovery after a time-out: clears counters and flags and starts a new generation of epochs.
  void recover();

  const LayerShape& shape() const;
  const Tuning& tuning() const;                        ///< the values in use, rounded
  std::int64_t workspace_bytes() const;                ///< of one rank
  const std::vector<TimelineEvent>& timeline() const;  ///< of the last run, when EmulatorOptions::timeline

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moewave
