// CudaLayer: the plan that all processes agree on, memory of this process's ranks, launches, and what is thrown after
// them.
#include "moewave/cuda_layer.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "kernels/sm90/forward_kernel.h"
#include "layer/configuration_hash.h"
#include "layer/cuda_rank.h"
#include "layer/kernel_failure.h"
#include "layer/tensor_map.h"
#include "plan/planner.h"
#include "transport/together.h"

namespace moewave {
namespace {

constexpr int kMajor = 9;  // compute capability that the kernel is compiled for, and no other
constexpr int kMinor = 0;

// SMs of the device that each rank on it has to itself. Throws InputError for a device that cannot run the kernel.
int available_sms(int device, int ranks_on_device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const std::string name = "device " + std::to_string(device) + " (" + properties.name + ")";
  if (properties.major != kMajor || properties.minor != kMinor) {
    throw InputError(name + " has compute capability " + std::to_string(properties.major) + "." +
                     std::to_string(properties.minor) + "; it must be 9.0");
  }
  const auto needed = static_cast<std::size_t>(sm90::forward_shared_bytes());
  if (properties.cooperativeLaunch == 0 || properties.sharedMemPerBlockOptin < needed) {
    throw InputError(name + " has " + std::to_string(properties.sharedMemPerBlockOptin) +
                     " bytes of shared memory a block and " + (properties.cooperativeLaunch == 0 ? "no" : "") +
                     " cooperative launches; needed are " + std::to_string(needed) + " bytes and such launches");
  }
  return properties.multiProcessorCount / ranks_on_device;
}

void check_options(const CudaLayerOptions& options) {
  const auto require = [](const char* name, std::int64_t value, std::int64_t min, std::int64_t max) {
    if (value >= min && value <= max) return;
    throw InputError(std::string(name) + " is " + std::to_string(value) + "; it must be " + std::to_string(min) +
                     " to " + std::to_string(max));
  };
  constexpr std::int64_t kMostMilliseconds = 1'000'000'000;
  require("entry_timeout_ms", options.entry_timeout_ms, 1, kMostMilliseconds);
  require("pipeline_timeout_ms", options.pipeline_timeout_ms, 1, kMostMilliseconds);
  require("timeline_events", options.timeline_events, 0, std::int64_t{1} << 24);
}

protocol::Geometry forward_geometry(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning) {
  protocol::Geometry geometry = plan::make_geometry(shape, ranks, max_tokens, tuning, /*saved_rows=*/0);
  geometry.backward = false;
  return geometry;
}

// What must be the same on all ranks, in words.
std::string agreement(const LayerShape& shape, std::int64_t max_tokens, const Tuning& tuning) {
  const auto clamp = [](const std::optional<float>& value) { return value ? std::to_string(*value) : "none"; };
  return "hidden " + std::to_string(shape.hidden) + ", intermediate " + std::to_string(shape.intermediate) +
         ", experts " + std::to_string(shape.experts) + ", topk " + std::to_string(shape.topk) +
         ", shared_intermediate " + std::to_string(shape.shared_intermediate) + ", clamp " + clamp(shape.clamp) +
         ", shared_clamp " + clamp(shape.shared_clamp) + ", max_tokens " + std::to_string(max_tokens) +
         ", minibatch_rows " + std::to_string(tuning.minibatch_rows) + ", ring_tokens " +
         std::to_string(tuning.ring_tokens) + ", ring_rows " + std::to_string(tuning.ring_rows) + ", sms " +
         std::to_string(tuning.sms) + ", comm_sms " + std::to_string(tuning.comm_sms);
}

// Collective: the tuning in use.
Tuning plan_layer(const LayerShape& shape, const Communicator& communicator, std::int64_t max_tokens,
                  const Tuning& tuning, const CudaLayerOptions& options) {
  ProcessGroup& processes = communicator.processes();
  int available = std::numeric_limits<int>::max();
  together(processes, [&] {
    check_options(options);
    for (std::size_t i = 0; i < communicator.local().size(); ++i) {
      available = std::min(available, available_sms(communicator.local()[i].device, communicator.ranks_on_device(i)));
    }
  });
  // All ranks take as many SMs as the rank that has the fewest.
  for (const std::string& theirs : processes.all_gather(std::to_string(available))) {
    available = std::min(available, std::stoi(theirs));
  }
  Tuning resolved;
  together(processes, [&] {
    resolved = plan::resolve_tuning(shape, communicator.size(), max_tokens,
                                    plan::choose_gpu_sms(tuning, communicator.size(), available));
  });
  const std::vector<std::string> agreements = processes.all_gather(agreement(shape, max_tokens, resolved));
  for (std::size_t process = 1; process < agreements.size(); ++process) {
    if (agreements[process] == agreements[0]) continue;
    throw InputError("process " + std::to_string(process) + " has " + agreements[process] + "; process 0 has " +
                     agreements[0] + "; they must agree");
  }
  return resolved;
}

CudaLayerBytes bytes_of(const protocol::Layout& layout, const Tuning& tuning, const CudaLayerOptions& options) {
  return {layout.shared.bytes, layout.workspace.bytes, layout.context.bytes,
          CudaRank::timeline_bytes(tuning.sms, options.timeline_events)};
}

float clamp_or_none(const std::optional<float>& clamp) {
  return clamp.value_or(std::numeric_limits<float>::infinity());
}

}  // namespace

struct WeightMaps::Impl {
  const void* layer = nullptr;
  std::size_t index = 0;
  sm90::ExpertMaps routed{};
  sm90::ExpertMaps shared{};
};

WeightMaps::WeightMaps() = default;
WeightMaps::~WeightMaps() = default;
WeightMaps::WeightMaps(WeightMaps&&) noexcept = default;
WeightMaps& WeightMaps::operator=(WeightMaps&&) noexcept = default;

class CudaLayer::Impl {
 public:
  Impl(const LayerShape& shape, std::shared_ptr<Communicator> communicator, std::int64_t max_tokens,
       const Tuning& tuning, const CudaLayerOptions& options)
      : shape_(shape),
        communicator_(std::move(communicator)),
        options_(options),
        tuning_(plan_layer(shape, *communicator_, max_tokens, tuning, options)),
        layout_(forward_geometry(shape, communicator_->size(), max_tokens, tuning_)),
        bytes_(bytes_of(layout_, tuning_, options)),
        shared_(communicator_->allocate(layout_.shared.bytes)) {
    const std::vector<LocalRank>& local = communicator_->local();
    together(processes(), [&] {
      for (std::size_t i = 0; i < local.size(); ++i) {
        ranks_.push_back(
            std::make_unique<CudaRank>(local[i], layout_, shared_->bases(i), tuning_.sms, options.timeline_events));
      }
      for (const int device : devices()) {
        const DeviceGuard guard(device);
        check_cuda(sm90::prepare_forward(), "loading the kernel on device " + std::to_string(device));
      }
      // The driver loads its own kernels at their first use, which may wait for running ones: for a call that waits for
      // this rank, say.
      for (const auto& rank : ranks_) {
        const DeviceGuard guard(rank->device());
        if (options.poison) rank->poison(rank->stream());
        rank->clear_timeline(rank->stream());
        check_cuda(cudaStreamSynchronize(rank->stream()), "cudaStreamSynchronize");
      }
    });
    calls_.resize(ranks_.size());
    reset(options.first_epoch);
  }

  ~Impl() {
    int current = 0;
    cudaGetDevice(&current);
    for (const int device : devices()) {
      if (cudaSetDevice(device) == cudaSuccess) cudaDeviceSynchronize();
    }
    cudaSetDevice(current);
  }

  // `expert_bytes`: from an expert's gate matrix to the next one's, and so for up.
  sm90::ExpertMaps expert_maps(const std::string& kind, const Bf16* gate, const Bf16* up, const Bf16* down,
                               std::int64_t width, std::int64_t experts, std::int64_t expert_bytes) const {
    check_address(kind + "gate", gate);
    check_address(kind + "up", up);
    if (gate == up) throw InputError(kind + "gate and up are the same address; they must be two matrices");
    const bool gate_lies_first = std::less<>()(gate, up);
    const Bf16* first = gate_lies_first ? gate : up;
    const auto distance = static_cast<std::uint64_t>(
        std::abs(reinterpret_cast<std::intptr_t>(gate) - reinterpret_cast<std::intptr_t>(up)));
    const TensorMapShape pair =
        pair_map_shape(shape_.hidden, width, experts, distance, static_cast<std::uint64_t>(expert_bytes),
                       sm90::kMapBoxColumns, sm90::kGateBoxRows, gate_lies_first ? 2 : 1);
    return {
        encode_tensor_map(kind + "gate and up", first, pair),
        encode_tensor_map(kind + "down", down,
                          matrix_map_shape(width, shape_.hidden, experts, sm90::kMapBoxColumns, sm90::kDownBoxRows)),
        gate_lies_first};
  }

  WeightMaps::Impl map_weights(std::size_t index, const DeviceWeights& weights) const {
    const CudaRank& rank = rank_at(index);
    const DeviceGuard guard(rank.device());
    WeightMaps::Impl maps;
    maps.layer = this;
    maps.index = index;
    const std::int64_t width = shape_.intermediate;
    const std::int64_t experts = protocol::expert_count(layout_.geometry.experts, layout_.geometry.ranks, rank.rank());
    const std::int64_t matrix = width * shape_.hidden;
    const std::int64_t bytes = matrix * static_cast<std::int64_t>(sizeof(Bf16));
    if (experts == 0) {
      // Never loaded: any device memory will do.
      const auto* nothing = static_cast<const Bf16*>(rank.workspace());
      maps.routed = expert_maps("no ", nothing, nothing + matrix, nothing, width, 0, 2 * bytes);
    } else if (weights.gate_up != nullptr) {
      if (weights.gate != nullptr || weights.up != nullptr) {
        throw InputError("weights have gate_up and gate or up; allowed are gate_up alone, or gate and up");
      }
      maps.routed =
          expert_maps("gate_up, ", weights.gate_up, weights.gate_up + matrix, weights.down, width, experts, 2 * bytes);
    } else {
      maps.routed = expert_maps("", weights.gate, weights.up, weights.down, width, experts, bytes);
    }
    const std::int64_t shared = shape_.shared_intermediate;
    if (shared > 0) {
      maps.shared = expert_maps("shared_", weights.shared_gate, weights.shared_up, weights.shared_down, shared, 1,
                                shared * shape_.hidden * static_cast<std::int64_t>(sizeof(Bf16)));
    }
    return maps;
  }

  void forward(std::size_t index, const WeightMaps::Impl* weights, const DeviceInputs& inputs, Bf16* output,
               cudaStream_t stream) {
    const CudaRank& rank = rank_at(index);
    if (needs_recovery_) throw Error("an earlier call stopped half-way; recover() the layer first");
    if (weights == nullptr || weights->layer != this || weights->index != index) {
      throw InputError("the weights of rank " + std::to_string(rank.rank()) + " were not mapped for it by this layer");
    }
    if (inputs.tokens < 0) {
      throw InputError("rank " + std::to_string(rank.rank()) + " has " + std::to_string(inputs.tokens) +
                       " tokens; it must be 0 or more");
    }
    if (inputs.tokens > 0) {
      check_address("hidden_states", inputs.hidden_states);
      check_address("output", output);
      if (inputs.topk_ids == nullptr) throw InputError("topk_ids is missing");
      if (inputs.topk_weights == nullptr) throw InputError("topk_weights is missing");
    }
    const DeviceGuard guard(rank.device());
    if (options_.poison) rank.poison(stream);
    rank.clear_timeline(stream);
    const sm90::ForwardParams params{
        .routed = weights->routed,
        .shared = weights->shared,
        .layout = layout_,
        .peers = rank.peers(communicator_->size()),
        .workspace = rank.workspace(),
        .context = rank.context(),
        .x = inputs.hidden_states,
        .topk_ids = inputs.topk_ids,
        .ids_are_64_bit = inputs.id_type == IdType::kInt64,
        .topk_weights = inputs.topk_weights,
        .tokens = inputs.tokens,
        .output = output,
        .clamp = clamp_or_none(shape_.clamp),
        .shared_clamp = clamp_or_none(shape_.shared_clamp),
        .comm_blocks = tuning_.comm_sms,
        .configuration = configuration_hash(layout_.geometry),
        .host = rank.words_on_device(),
        .entry_limit_ns = static_cast<std::uint64_t>(options_.entry_timeout_ms) * 1'000'000,
        .pipeline_limit_ns = static_cast<std::uint64_t>(options_.pipeline_timeout_ms) * 1'000'000,
        .jitter_ns = options_.jitter_ns,
        .trace = rank.trace(),
    };
    check_cuda(sm90::launch_forward(params, tuning_.sms, stream), "launch of rank " + std::to_string(rank.rank()));
    calls_[index] = {stream, true, inputs.tokens};
  }

  void check() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) wait_for(i);
    throw_if_stopped();
    const auto first_with = [&](auto has) {
      return std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) { return has(rank->words()); });
    };
    if (const auto it = first_with([](const auto& words) { return words.has_verdict != 0; }); it != ranks_.end()) {
      const sm90::HostWords words = (*it)->words();
      for (const auto& rank : ranks_) rank->words().has_verdict = 0;
      throw_verdict(words, layout_.geometry);
    }
    if (const auto it = first_with([](const auto& words) { return words.has_bad_route != 0; }); it != ranks_.end()) {
      const sm90::HostWords words = (*it)->words();
      for (const auto& rank : ranks_) rank->words().has_bad_route = 0;
      throw_bad_route(words, layout_.geometry);
    }
  }

  void recover() {
    std::uint32_t last = 0;
    together(processes(), [&] {
      for (const int device : devices()) {
        const DeviceGuard guard(device);
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      }
      last = ranks_[0]->epoch();
      for (const auto& rank : ranks_) last = later(last, rank->epoch());
    });
    for (const std::string& theirs : processes().all_gather(std::to_string(last))) {
      last = later(last, static_cast<std::uint32_t>(std::stoul(theirs)));
    }
    // Past every epoch that a rank may have begun, so that no flag of the broken call can be taken for a new one.
    reset(last + 2);
    needs_recovery_ = false;
  }

  CallReport report() const {
    CallReport report = empty_call_report(layout_.geometry, false);
    report.ranks.resize(static_cast<std::size_t>(communicator_->size()));
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      report.ranks[static_cast<std::size_t>(ranks_[i]->rank())] = ranks_[i]->report(calls_[i].tokens, report);
    }
    return report;
  }

  std::vector<TimelineEvent> timeline() const {
    std::vector<TimelineEvent> events;
    for (const auto& rank : ranks_) {
      const std::vector<TimelineEvent> theirs = rank->timeline();
      events.insert(events.end(), theirs.begin(), theirs.end());
    }
    if (events.empty()) return events;
    const auto by_begin = [](const TimelineEvent& a, const TimelineEvent& b) { return a.begin_ns < b.begin_ns; };
    const std::int64_t start = std::min_element(events.begin(), events.end(), by_begin)->begin_ns;
    for (TimelineEvent& event : events) event.begin_ns -= start, event.end_ns -= start;
    return events;
  }

  cudaStream_t stream(std::size_t index) const { return rank_at(index).stream(); }
  const LayerShape& shape() const { return shape_; }
  const Tuning& tuning() const { return tuning_; }
  std::int64_t max_tokens() const { return layout_.geometry.max_tokens; }
  const Communicator& communicator() const { return *communicator_; }
  const CudaLayerBytes& bytes() const { return bytes_; }

 private:
  // The last call of a rank.
  struct LastCall {
    cudaStream_t stream = nullptr;
    bool is_unchecked = false;
    std::int64_t tokens = 0;
  };

  static std::uint32_t later(std::uint32_t a, std::uint32_t b) { return protocol::has_reached(a, b) ? a : b; }

  ProcessGroup& processes() const { return communicator_->processes(); }

  std::set<int> devices() const {
    std::set<int> result;
    for (const LocalRank& rank : communicator_->local()) result.insert(rank.device);
    return result;
  }

  const CudaRank& rank_at(std::size_t index) const {
    if (index >= ranks_.size()) {
      throw InputError("index " + std::to_string(index) + " is not allowed; this process has ranks 0 to " +
                       std::to_string(ranks_.size() - 1) + " of its own");
    }
    return *ranks_[index];
  }

  // Nobody may raise a flag of the new range before all have cleared theirs.
  void reset(std::uint32_t epoch) {
    together(processes(), [&] {
      for (const auto& rank : ranks_) rank->reset(epoch);
    });
  }

  // The calls of a rank follow one another, so the last one's stream is enough.
  void wait_for(std::size_t index) {
    LastCall& call = calls_[index];
    if (!call.is_unchecked) return;
    const DeviceGuard guard(ranks_[index]->device());
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(call.stream, &capture), "cudaStreamIsCapturing");
    if (capture != cudaStreamCaptureStatusNone) return;  // nothing runs yet, and waiting would break the capture
    check_cuda(cudaStreamSynchronize(call.stream), "a call of rank " + std::to_string(ranks_[index]->rank()));
    call.is_unchecked = false;
  }

  void throw_if_stopped() {
    const CudaRank* first = nullptr;
    for (const auto& rank : ranks_) {
      if (rank->words().stop.state == 0) continue;
      // The first call that stopped is the cause of the others.
      if (first == nullptr || !protocol::has_reached(rank->words().stop.epoch, first->words().stop.epoch)) {
        first = rank.get();
      }
    }
    if (first != nullptr) {
      needs_recovery_ = true;
      throw_timeout(wait_record(first->rank(), first->words().stop));
    }
    if (processes().processes() == 1) return;
    if (std::none_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->is_stopped(); })) return;
    needs_recovery_ = true;
    throw TimeoutError("a rank of another process waited too long; its process says for what", WaitRecord{});
  }

  LayerShape shape_;
  std::shared_ptr<Communicator> communicator_;
  CudaLayerOptions options_;
  Tuning tuning_;
  protocol::Layout layout_;
  CudaLayerBytes bytes_;
  std::unique_ptr<SharedMemory> shared_;
  std::vector<std::unique_ptr<CudaRank>> ranks_;
  std::vector<LastCall> calls_;
  bool needs_recovery_ = false;
};

CudaLayer::CudaLayer(const LayerShape& shape, std::shared_ptr<Communicator> communicator, std::int64_t max_tokens,
                     const Tuning& tuning, const CudaLayerOptions& options)
    : impl_(std::make_unique<Impl>(shape, std::move(communicator), max_tokens, tuning, options)) {}
CudaLayer::~CudaLayer() = default;

CudaLayerBytes CudaLayer::required_bytes(const LayerShape& shape, const Communicator& communicator,
                                         std::int64_t max_tokens, const Tuning& tuning,
                                         const CudaLayerOptions& options) {
  const Tuning resolved = plan_layer(shape, communicator, max_tokens, tuning, options);
  const protocol::Layout layout(forward_geometry(shape, communicator.size(), max_tokens, resolved));
  return bytes_of(layout, resolved, options);
}

std::int64_t CudaLayer::shared_bytes(const LayerShape& shape, int ranks, std::int64_t max_tokens) {
  // What peers reach does not depend on how the work is cut.
  const Tuning tuning = plan::resolve_tuning(shape, ranks, max_tokens, {});
  return protocol::SharedLayout(forward_geometry(shape, ranks, max_tokens, tuning)).bytes;
}

WeightMaps CudaLayer::map_weights(std::size_t index, const DeviceWeights& weights) const {
  WeightMaps maps;
  maps.impl_ = std::make_unique<WeightMaps::Impl>(impl_->map_weights(index, weights));
  return maps;
}

void CudaLayer::forward(std::size_t index, const WeightMaps& weights, const DeviceInputs& inputs, Bf16* output,
                        CudaStream stream) {
  impl_->forward(index, weights.impl_.get(), inputs, output, stream);
}

CudaStream CudaLayer::stream(std::size_t index) const { return impl_->stream(index); }
void CudaLayer::check() { impl_->check(); }
void CudaLayer::recover() { impl_->recover(); }
CallReport CudaLayer::report() const { return impl_->report(); }
std::vector<TimelineEvent> CudaLayer::timeline() const { return impl_->timeline(); }
const LayerShape& CudaLayer::shape() const { return impl_->shape(); }
const Tuning& CudaLayer::tuning() const { return impl_->tuning(); }
std::int64_t CudaLayer::max_tokens() const { return impl_->max_tokens(); }
const Communicator& CudaLayer::communicator() const { return impl_->communicator(); }
const CudaLayerBytes& CudaLayer::bytes() const { return impl_->bytes(); }

}  // namespace moewave
