#include "bench_layer.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/sm90/random_fill.h"

namespace moewave::cli {
namespace {

constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;  // several times the L2

std::int64_t largest(const std::vector<std::int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

DeviceBuffer<Bf16> random_tensor(int device, std::int64_t count, std::uint64_t seed, math::RandomStream values,
                                 std::int64_t first, double variance, const char* name) {
  DeviceBuffer<Bf16> buffer(device, count, name);
  const DeviceGuard guard(device);
  check_cuda(sm90::launch_random_fill(buffer.get(), count, seed, values, first, variance, nullptr), name);
  return buffer;
}

template <typename T>
std::vector<T> read(const DeviceBuffer<T>& buffer, std::int64_t first, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  buffer.read(std::span(values), first);
  return values;
}

}  // namespace

BenchLayer::BenchLayer(const LayerShape& shape, const std::vector<int>& devices, HostBatch routes, const Tuning& tuning,
                       std::uint64_t seed)
    : routes_(std::move(routes)), layer_(shape, in_process(devices), largest(routes_.tokens_per_rank), tuning) {
  for (std::size_t i = 0; i < devices.size(); ++i) make_rank(i, seed);
  wait_for_all();
}

void BenchLayer::make_rank(std::size_t index, std::uint64_t seed) {
  using Stream = math::RandomStream;
  const auto [rank, device] = layer_.communicator().local()[index];
  const LayerShape& shape = layer_.shape();
  const ExpertRange experts = local_experts(shape.experts, layer_.communicator().size(), rank);
  const std::int64_t matrix = shape.hidden * shape.intermediate;
  const std::int64_t shared = shape.hidden * shape.shared_intermediate;
  const double hidden_variance = 1.0 / static_cast<double>(shape.hidden);
  std::int64_t first_token = 0;
  for (int r = 0; r < rank; ++r) first_token += routes_.tokens_per_rank[static_cast<std::size_t>(r)];
  const std::int64_t tokens = routes_.tokens_per_rank[index];
  const auto routes_of = [&](const auto& values) {
    return std::span(values).subspan(static_cast<std::size_t>(first_token * shape.topk),
                                     static_cast<std::size_t>(tokens * shape.topk));
  };

  Rank& r = ranks_.emplace_back(Rank{device, {}, {}, {}, {}, {}, {}, {}, {}, {}, StreamTimer(device), {}});
  r.gate_up = random_tensor(device, experts.size() * 2 * matrix, seed, Stream::kGateUp, experts.begin * 2 * matrix,
                            hidden_variance, "gate_up");
  r.down = random_tensor(device, experts.size() * matrix, seed, Stream::kDown, experts.begin * matrix,
                         1.0 / static_cast<double>(shape.intermediate), "down");
  if (shared > 0) {
    r.shared_gate = random_tensor(device, shared, seed, Stream::kSharedGate, 0, hidden_variance, "shared_gate");
    r.shared_up = random_tensor(device, shared, seed, Stream::kSharedUp, 0, hidden_variance, "shared_up");
    r.shared_down = random_tensor(device, shared, seed, Stream::kSharedDown, 0,
                                  1.0 / static_cast<double>(shape.shared_intermediate), "shared_down");
  }
  r.ids = {device, std::span<const std::int32_t>(routes_of(routes_.topk_ids)), "topk_ids"};
  r.weights = {device, std::span<const float>(routes_of(routes_.topk_weights)), "topk_weights"};
  for (std::size_t set = 0; set < kSets; ++set) {
    Tensors tensors;
    tensors.x = random_tensor(device, tokens * shape.hidden, seed + set, Stream::kHiddenStates,
                              first_token * shape.hidden, 1.0, "hidden_states");
    tensors.output = {device, tokens * shape.hidden, "output"};
    r.sets.push_back(std::move(tensors));
  }
  const bool is_first_on_device =
      std::none_of(ranks_.begin(), ranks_.end() - 1, [&](const Rank& other) { return other.device == device; });
  if (is_first_on_device) r.flush = {device, kFlushBytes, "the buffer that flushes the L2"};
  r.maps = layer_.map_weights(index, {.gate_up = r.gate_up.get(),
                                      .down = r.down.get(),
                                      .shared_gate = r.shared_gate.get(),
                                      .shared_up = r.shared_up.get(),
                                      .shared_down = r.shared_down.get()});
}

void BenchLayer::enqueue(std::size_t index, std::size_t set) {
  const Rank& rank = ranks_[index];
  const Tensors& tensors = rank.sets[set % kSets];
  layer_.forward(index, rank.maps,
                 {tensors.x.get(), rank.ids.get(), IdType::kInt32, rank.weights.get(), routes_.tokens_per_rank[index]},
                 tensors.output.get(), layer_.stream(index));
}

void BenchLayer::wait_for_all() const {
  std::set<int> devices;
  for (const Rank& rank : ranks_) devices.insert(rank.device);
  for (const int device : devices) {
    const DeviceGuard guard(device);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
}

void BenchLayer::flush_caches() {
  for (const Rank& rank : ranks_) {
    if (rank.flush.size() == 0) continue;
    const DeviceGuard guard(rank.device);
    check_cuda(cudaMemsetAsync(rank.flush.get(), 0, static_cast<std::size_t>(rank.flush.size()), nullptr),
               "cudaMemsetAsync");
  }
  wait_for_all();
}

double BenchLayer::slowest(const std::vector<Rank>& ranks) const {
  double seconds = 0;
  for (const Rank& rank : ranks) seconds = std::max(seconds, rank.timer.seconds());
  return seconds;
}

BenchTimes BenchLayer::time(std::int64_t warmup, std::int64_t iterations) {
  BenchTimes times;
  for (std::int64_t call = 0; call < warmup + iterations; ++call) {
    flush_caches();
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].timer.begin(layer_.stream(i));
      enqueue(i, static_cast<std::size_t>(call));
      ranks_[i].timer.end(layer_.stream(i));
    }
    layer_.check();
    wait_for_all();
    if (call >= warmup) times.isolated.push_back(slowest(ranks_));
  }
  flush_caches();
  for (std::size_t i = 0; i < ranks_.size(); ++i) ranks_[i].timer.begin(layer_.stream(i));
  for (std::int64_t call = 0; call < iterations; ++call) {
    for (std::size_t i = 0; i < ranks_.size(); ++i) enqueue(i, static_cast<std::size_t>(call));
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) ranks_[i].timer.end(layer_.stream(i));
  layer_.check();
  wait_for_all();
  times.sustained = slowest(ranks_) / static_cast<double>(iterations);
  return times;
}

void BenchLayer::run_once() {
  for (const Rank& rank : ranks_) {
    const DeviceGuard guard(rank.device);
    const DeviceBuffer<Bf16>& output = rank.sets[0].output;
    check_cuda(cudaMemset(output.get(), 0xff, static_cast<std::size_t>(output.size()) * sizeof(Bf16)), "cudaMemset");
  }
  wait_for_all();
  for (std::size_t i = 0; i < ranks_.size(); ++i) enqueue(i, 0);
  layer_.check();
}

std::vector<Bf16> BenchLayer::x_row(int rank, std::int64_t token) const {
  return read(ranks_[static_cast<std::size_t>(rank)].sets[0].x, token * shape().hidden, shape().hidden);
}

std::vector<Bf16> BenchLayer::output_row(int rank, std::int64_t token) const {
  return read(ranks_[static_cast<std::size_t>(rank)].sets[0].output, token * shape().hidden, shape().hidden);
}

BenchLayer::ExpertWeights BenchLayer::expert(std::int64_t number) const {
  const int ranks = layer_.communicator().size();
  const std::int64_t matrix = shape().hidden * shape().intermediate;
  for (int rank = 0; rank < ranks; ++rank) {
    const ExpertRange experts = local_experts(shape().experts, ranks, rank);
    if (number >= experts.end) continue;
    const Rank& owner = ranks_[static_cast<std::size_t>(rank)];
    const std::int64_t index = number - experts.begin;
    return {read(owner.gate_up, index * 2 * matrix, 2 * matrix), read(owner.down, index * matrix, matrix)};
  }
  throw Error("expert " + std::to_string(number) + " has no owner");
}

BenchLayer::ExpertWeights BenchLayer::shared_expert() const {
  const Rank& rank = ranks_[0];
  ExpertWeights weights{read(rank.shared_gate, 0, rank.shared_gate.size()),
                        read(rank.shared_down, 0, rank.shared_down.size())};
  const std::vector<Bf16> up = read(rank.shared_up, 0, rank.shared_up.size());
  weights.gate_up.insert(weights.gate_up.end(), up.begin(), up.end());
  return weights;
}

}  // namespace moewave::cli
