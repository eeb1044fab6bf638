// run and verify on GPUs: uploads a problem, runs one forward call of all ranks, brings everything back.
#include <chrono>
#include <limits>

#include "cuda_backend.h"
#include "device_buffer.h"
#include "moewave/cuda_layer.h"
#include "progress.h"

namespace moewave::cli {
namespace {

constexpr std::int64_t kTimelineEvents = 1 << 14;  // of a block and track

struct RankTensors {
  DeviceBuffer<Bf16> gate_up, down, shared_gate, shared_up, shared_down;
  DeviceBuffer<Bf16> x, output;
  DeviceBuffer<std::int32_t> ids;
  DeviceBuffer<float> weights;
};

template <typename T>
std::span<const T> part_of(const std::vector<T>& values, std::int64_t first, std::int64_t count) {
  return std::span(values).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

RankTensors upload(const Problem& problem, const LocalRank& place, std::int64_t first_token) {
  const LayerShape& shape = problem.shape;
  const ExpertRange experts = local_experts(shape.experts, problem.ranks, place.rank);
  const std::int64_t matrix = shape.hidden * shape.intermediate;
  const std::int64_t tokens = problem.batch.tokens_per_rank[static_cast<std::size_t>(place.rank)];
  const HostWeights& w = problem.weights;
  const HostBatch& b = problem.batch;
  const int device = place.device;
  RankTensors t;
  t.gate_up = {device, part_of(w.gate_up, experts.begin * 2 * matrix, experts.size() * 2 * matrix), "gate_up"};
  t.down = {device, part_of(w.down, experts.begin * matrix, experts.size() * matrix), "down"};
  t.shared_gate = {device, std::span(w.shared_gate), "shared_gate"};
  t.shared_up = {device, std::span(w.shared_up), "shared_up"};
  t.shared_down = {device, std::span(w.shared_down), "shared_down"};
  t.x = {device, part_of(b.hidden_states, first_token * shape.hidden, tokens * shape.hidden), "hidden_states"};
  t.ids = {device, part_of(b.topk_ids, first_token * shape.topk, tokens * shape.topk), "topk_ids"};
  t.weights = {device, part_of(b.topk_weights, first_token * shape.topk, tokens * shape.topk), "topk_weights"};
  t.output = {device, tokens * shape.hidden, "output"};
  return t;
}

CudaLayerOptions layer_options(const RunOptions& options) {
  CudaLayerOptions result;
  result.jitter_ns = static_cast<std::uint32_t>(options.jitter_us * 1000);
  result.poison = options.poison;
  if (!options.timeline.empty()) result.timeline_events = kTimelineEvents;
  return result;
}

}  // namespace

RunResult run_cuda(const Problem& problem, const RunOptions& options) {
  RunResult result;
  CudaLayer layer(problem.shape, in_process(devices_of_ranks(problem.ranks)), problem.max_tokens(), options.tuning,
                  layer_options(options));
  const std::vector<LocalRank>& ranks = layer.communicator().local();
  std::vector<RankTensors> tensors;
  std::vector<WeightMaps> maps;
  std::vector<StreamTimer> timers;
  std::int64_t first_token = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankTensors& t = tensors.emplace_back(upload(problem, ranks[i], first_token));
    maps.push_back(layer.map_weights(i, {.gate_up = t.gate_up.get(),
                                         .down = t.down.get(),
                                         .shared_gate = t.shared_gate.get(),
                                         .shared_up = t.shared_up.get(),
                                         .shared_down = t.shared_down.get()}));
    timers.emplace_back(ranks[i].device);
    first_token += problem.batch.tokens_per_rank[i];
  }
  {
    const Progress progress("cuda, forward");
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const RankTensors& t = tensors[i];
      timers[i].begin(layer.stream(i));
      layer.forward(i, maps[i],
                    {t.x.get(), t.ids.get(), IdType::kInt32, t.weights.get(), problem.batch.tokens_per_rank[i]},
                    t.output.get(), layer.stream(i));
      timers[i].end(layer.stream(i));
    }
    layer.check();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  result.output.resize(static_cast<std::size_t>(first_token * problem.shape.hidden));
  std::int64_t first = 0;
  CallReport& report = result.calls.emplace_back(layer.report());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    check_cuda(cudaStreamSynchronize(layer.stream(i)), "cudaStreamSynchronize");
    const std::int64_t count = tensors[i].output.size();
    tensors[i].output.read(
        std::span(result.output).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
    report.ranks[i].seconds = timers[i].seconds();
    first += count;
  }
  result.tuning = layer.tuning();
  result.workspace_bytes = layer.workspace_bytes();
  result.timeline = layer.timeline();
  return result;
}

}  // namespace moewave::cli
