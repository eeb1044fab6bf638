// Running a case on the GPUs of this machine, in device memory of its own for each call.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "moewave/cuda_layer.h"
#include "support/layer_case.h"
#include "support/tensor_error.h"

namespace moewave::test {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Rank r on GPU r % gpus.
inline std::vector<int> spread(int ranks) {
  std::vector<int> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back(rank % gpus());
  return devices;
}

/// Values in the memory of a device.
template <typename T>
class DeviceValues {
 public:
  DeviceValues() = default;
  DeviceValues(int device, std::size_t count) : count_(count) {
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, (count > 0 ? count : 1) * sizeof(T)), "cudaMalloc");
    memory_.reset(static_cast<T*>(memory));
  }
  DeviceValues(int device, std::span<const T> values) : DeviceValues(device, values.size()) { set(values); }

  void set(std::span<const T> values) const {
    if (!values.empty()) {
      check_cuda(cudaMemcpy(get(), values.data(), values.size_bytes(), cudaMemcpyDefault), "cudaMemcpy");
    }
  }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    if (count_ > 0) {
      check_cuda(cudaMemcpy(result.data(), get(), count_ * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
    }
    return result;
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  std::size_t count_ = 0;
};

/// Poison and short limits, so that a fault shows and ends.
inline CudaLayerOptions test_options() {
  CudaLayerOptions options;
  options.poison = true;
  options.entry_timeout_ms = 20'000;
  options.pipeline_timeout_ms = 5'000;
  return options;
}

struct CudaSetup {
  Tuning tuning;
  CudaLayerOptions options = test_options();
  std::int64_t max_tokens = -1;  // -1: as many as the case has
  IdType id_type = IdType::kInt32;
  bool separate_gate_and_up = false;
  bool up_first = false;  // of separate ones: in memory
};

/// The smallest ring there is: two segments of one block of tokens each, one tile a minibatch.
inline CudaSetup tiny_ring() {
  CudaSetup setup;
  setup.tuning.minibatch_rows = 1;
  setup.tuning.ring_tokens = 1;
  setup.tuning.ring_rows = 1;
  return setup;
}

/// A call's tensors on one rank's device. The output begins as NaN: what a call should have written and did not, shows.
struct RankTensors {
  DeviceValues<Bf16> x;
  DeviceValues<std::int32_t> ids;
  DeviceValues<std::int64_t> wide_ids;
  DeviceValues<float> weights;
  DeviceValues<Bf16> output;
  DeviceInputs inputs;
};

/// A layer whose ranks are spread over the GPUs, with the weights of one case.
class CudaRun {
 public:
  explicit CudaRun(const LayerCase& c, const CudaSetup& setup = {})
      : CudaRun(c, setup, in_process(spread(c.ranks()))) {}

  CudaRun(const LayerCase& c, const CudaSetup& setup, const std::shared_ptr<Communicator>& communicator)
      : shape_(c.shape),
        setup_(setup),
        layer_(c.shape, communicator, setup.max_tokens < 0 ? c.max_tokens() : setup.max_tokens, setup.tuning,
               setup.options) {
    for (std::size_t i = 0; i < local().size(); ++i) upload_weights(i, c.weights);
  }

  CudaLayer& layer() { return layer_; }
  const std::vector<LocalRank>& local() const { return layer_.communicator().local(); }

  /// One call's tensors of the ranks of this process. 64-bit ids are those of the batch unless given.
  std::vector<RankTensors> upload(const HostBatch& batch, const std::vector<std::int64_t>* wide_ids = nullptr) const {
    std::vector<RankTensors> result;
    for (const LocalRank& rank : local()) result.push_back(upload_rank(batch, rank, wide_ids));
    return result;
  }

  void enqueue(const std::vector<RankTensors>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) enqueue_rank(i, tensors[i]);
  }
  void enqueue_rank(std::size_t index, const RankTensors& tensors) {
    layer_.forward(index, maps_[index], tensors.inputs, tensors.output.get(), layer_.stream(index));
  }

  static std::vector<Bf16> output(const std::vector<RankTensors>& tensors) {
    std::vector<Bf16> result;
    for (const RankTensors& rank : tensors) {
      const std::vector<Bf16> rows = rank.output.values();
      result.insert(result.end(), rows.begin(), rows.end());
    }
    return result;
  }

  std::vector<Bf16> run(const HostBatch& batch) {
    const std::vector<RankTensors> tensors = upload(batch);
    enqueue(tensors);
    layer_.check();
    return output(tensors);
  }

 private:
  struct RankWeights {
    DeviceValues<Bf16> gate_up, down, shared_gate, shared_up, shared_down;
  };

  void upload_weights(std::size_t index, const HostWeights& weights) {
    const auto [rank, device] = local()[index];
    const ExpertRange experts = local_experts(shape_.experts, layer_.communicator().size(), rank);
    const auto matrix = static_cast<std::size_t>(shape_.hidden * shape_.intermediate);
    const auto first = static_cast<std::size_t>(experts.begin);
    const auto count = static_cast<std::size_t>(experts.size());
    const std::span<const Bf16> gate_up = std::span(weights.gate_up).subspan(first * 2 * matrix, count * 2 * matrix);
    RankWeights& mine = weights_.emplace_back();
    DeviceWeights pointers;
    if (setup_.separate_gate_and_up) {
      std::vector<Bf16> gate, up;
      for (std::size_t e = 0; e < count; ++e) {
        const auto both = gate_up.subspan(e * 2 * matrix, 2 * matrix);
        gate.insert(gate.end(), both.begin(), both.begin() + static_cast<std::ptrdiff_t>(matrix));
        up.insert(up.end(), both.begin() + static_cast<std::ptrdiff_t>(matrix), both.end());
      }
      // One block of memory, with room between them that is no whole number of rows.
      const std::size_t apart = gate.size() + 8;
      mine.gate_up = DeviceValues<Bf16>(device, apart + up.size());
      Bf16* first = mine.gate_up.get();
      pointers.gate = setup_.up_first ? first + apart : first;
      pointers.up = setup_.up_first ? first : first + apart;
      for (const auto& [to, from] : {std::pair{pointers.gate, &gate}, std::pair{pointers.up, &up}}) {
        if (from->empty()) continue;
        check_cuda(cudaMemcpy(const_cast<Bf16*>(to), from->data(), from->size() * sizeof(Bf16), cudaMemcpyDefault),
                   "cudaMemcpy");
      }
    } else {
      mine.gate_up = DeviceValues<Bf16>(device, gate_up);
      pointers.gate_up = mine.gate_up.get();
    }
    mine.down = DeviceValues<Bf16>(device, std::span(weights.down).subspan(first * matrix, count * matrix));
    mine.shared_gate = DeviceValues<Bf16>(device, std::span(weights.shared_gate));
    mine.shared_up = DeviceValues<Bf16>(device, std::span(weights.shared_up));
    mine.shared_down = DeviceValues<Bf16>(device, std::span(weights.shared_down));
    pointers.down = mine.down.get();
    pointers.shared_gate = mine.shared_gate.get();
    pointers.shared_up = mine.shared_up.get();
    pointers.shared_down = mine.shared_down.get();
    maps_.push_back(layer_.map_weights(index, pointers));
  }

  RankTensors upload_rank(const HostBatch& batch, const LocalRank& place,
                          const std::vector<std::int64_t>* wide_ids) const {
    std::int64_t first = 0;
    for (int r = 0; r < place.rank; ++r) first += batch.tokens_per_rank[static_cast<std::size_t>(r)];
    const std::int64_t tokens = batch.tokens_per_rank[static_cast<std::size_t>(place.rank)];
    const auto part = [&](const auto& values, std::int64_t width) {
      return std::span(values).subspan(static_cast<std::size_t>(first * width),
                                       static_cast<std::size_t>(tokens * width));
    };
    RankTensors rank;
    rank.x = DeviceValues<Bf16>(place.device, part(batch.hidden_states, shape_.hidden));
    rank.weights = DeviceValues<float>(place.device, part(batch.topk_weights, shape_.topk));
    const std::vector<Bf16> nan(static_cast<std::size_t>(tokens * shape_.hidden), Bf16{0xffff});
    rank.output = DeviceValues<Bf16>(place.device, std::span(nan));
    rank.inputs = {rank.x.get(), nullptr, setup_.id_type, rank.weights.get(), tokens};
    if (setup_.id_type == IdType::kInt64) {
      const std::vector<std::int64_t> widened(batch.topk_ids.begin(), batch.topk_ids.end());
      rank.wide_ids = DeviceValues<std::int64_t>(place.device, part(wide_ids ? *wide_ids : widened, shape_.topk));
      rank.inputs.topk_ids = rank.wide_ids.get();
    } else {
      rank.ids = DeviceValues<std::int32_t>(place.device, part(batch.topk_ids, shape_.topk));
      rank.inputs.topk_ids = rank.ids.get();
    }
    return rank;
  }

  LayerShape shape_;
  CudaSetup setup_;
  std::vector<RankWeights> weights_;
  CudaLayer layer_;
  std::vector<WeightMaps> maps_;
};

inline void expect_matches(const LayerCase& c, const std::vector<Bf16>& output) {
  constexpr double kBound = 5e-3;
  const ReferenceResult reference = run_reference(c.shape, c.weights, c.batch, false);
  expect_close("output", widen(output), reference.output, c.shape.hidden, kBound);
}

/// Two calls on one layer: several kinds of fault show only in the second.
inline std::vector<Bf16> expect_two_calls_match(const LayerCase& c, const CudaSetup& setup = {}) {
  CudaRun run(c, setup);
  const std::vector<Bf16> first = run.run(c.batch);
  const std::vector<Bf16> second = run.run(c.batch);
  expect_matches(c, first);
  expect_same_bits("output of the second call", second, first);
  return first;
}

}  // namespace moewave::test
