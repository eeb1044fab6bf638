// The layer that bench times: random weights and tokens made on the GPUs, several sets of inputs, all ranks in this
// process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device_buffer.h"
#include "moewave/cuda_layer.h"
#include "moewave/host_layer.h"

namespace moewave::cli {

/// Times of calls in seconds, of the slowest rank.
struct BenchTimes {
  std::vector<double> isolated;  ///< each call by itself, ranks started together, caches flushed before
  double sustained = 0;          ///< one of many calls back to back
};

class BenchLayer {
 public:
  /// `routes`: ids and router weights of all ranks; its hidden_states are not used.
  BenchLayer(const LayerShape& shape, const std::vector<int>& devices, HostBatch routes, const Tuning& tuning,
             std::uint64_t seed);

  BenchTimes time(std::int64_t warmup, std::int64_t iterations);

  /// One more call, with an output that was NaN before.
  void run_once();

  const CudaLayer& layer() const { return layer_; }
  const LayerShape& shape() const { return layer_.shape(); }
  const HostBatch& routes() const { return routes_; }

  // Of run_once: rows of a rank's tokens, and an expert's weights, on the host.
  std::vector<Bf16> x_row(int rank, std::int64_t token) const;
  std::vector<Bf16> output_row(int rank, std::int64_t token) const;
  struct ExpertWeights {
    std::vector<Bf16> gate_up;  // [2 width, H]
    std::vector<Bf16> down;     // [H, width]
  };
  ExpertWeights expert(std::int64_t number) const;
  ExpertWeights shared_expert() const;

 private:
  // More than the L2 holds of them, together with the weights: a call finds none of its inputs there.
  static constexpr std::size_t kSets = 3;

  struct Tensors {
    DeviceBuffer<Bf16> x;
    DeviceBuffer<Bf16> output;
  };
  struct Rank {
    int device;
    DeviceBuffer<Bf16> gate_up, down, shared_gate, shared_up, shared_down;
    DeviceBuffer<std::int32_t> ids;
    DeviceBuffer<float> weights;
    std::vector<Tensors> sets;
    DeviceBuffer<char> flush;  // the first rank of a GPU has one
    StreamTimer timer;
    WeightMaps maps;
  };

  void make_rank(std::size_t index, std::uint64_t seed);
  void enqueue(std::size_t index, std::size_t set);
  void flush_caches();
  void wait_for_all() const;
  double slowest(const std::vector<Rank>& ranks) const;

  HostBatch routes_;
  std::vector<Rank> ranks_;
  CudaLayer layer_;
};

}  // namespace moewave::cli
