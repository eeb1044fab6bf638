// EmulatedLayer: memory and threads of all ranks, the list of calls, and what is thrown after a run.
#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <thread>

#include "cpu/sm.h"
#include "layer/call_report.h"
#include "layer/plural.h"
#include "moewave/host_layer.h"
#include "plan/planner.h"

namespace moewave {

using cpu::Memory;
using cpu::RankCall;
using cpu::RankMemory;
using cpu::RunState;
using cpu::Sm;

namespace {

constexpr int kMaxThreads = 4096;

std::uint64_t hash_ids(const HostBatch& batch) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a over the ids
  for (const std::int32_t id : batch.topk_ids) hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x100000001b3u;
  return hash;
}

// Tells layers apart for good; an address would come back after a layer's end.
std::uint64_t next_layer_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

// FP32 shares of the shared expert's weight gradients, a rank after another.
struct SharedShares {
  std::vector<float> gate, up, down;
};

}  // namespace

class SavedContextImpl {
 public:
  std::uint64_t layer = 0;  // id of the layer that wrote it
  std::vector<Memory> ranks;
  bool is_filled = false;
  std::vector<std::int64_t> tokens_per_rank;
  std::uint64_t ids_hash = 0;
};

SavedContext::SavedContext() : impl_(std::make_unique<SavedContextImpl>()) {}
SavedContext::~SavedContext() = default;
SavedContext::SavedContext(SavedContext&&) noexcept = default;
SavedContext& SavedContext::operator=(SavedContext&&) noexcept = default;

std::int64_t SavedContext::bytes() const {
  std::int64_t sum = 0;
  if (impl_ == nullptr) return sum;  // moved from
  for (const Memory& memory : impl_->ranks) sum += memory.bytes();
  return sum;
}

class EmulatedLayer::Impl {
 public:
  Impl(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning,
       const EmulatorOptions& options)
      : shape_(shape),
        ranks_(ranks),
        options_(options),
        tuning_(plan::resolve_tuning(shape, ranks, max_tokens, tuning)),
        layout_(plan::make_geometry(shape, ranks, max_tokens, tuning_, options.saved_rows)) {
    if (std::int64_t{ranks} * tuning_.sms > kMaxThreads) {
      throw InputError("more than " + std::to_string(kMaxThreads) + " threads for " + plural(ranks, "rank") + " of " +
                       plural(tuning_.sms, "SM") + "; use fewer ranks or SMs");
    }
    for (int rank = 0; rank < ranks; ++rank) memory_.emplace_back(layout_);
    for (RankMemory& memory : memory_) bases_.push_back(memory.shared.get());
    reset(options.first_epoch);
  }

  void run(std::span<const EmulatedCall> calls);

  void recover() {
    std::uint32_t last = *epoch_of(0);
    for (int rank = 1; rank < ranks_; ++rank) {
      if (protocol::has_reached(*epoch_of(rank), last)) last = *epoch_of(rank);
    }
    // Past every epoch that a rank may have begun, so that no flag of the broken call can be taken for a new one.
    reset(last + 2);
    needs_recovery_ = false;
  }

  const LayerShape& shape() const { return shape_; }
  const Tuning& tuning() const { return tuning_; }
  const std::vector<TimelineEvent>& timeline() const { return timeline_; }
  std::int64_t workspace_bytes() const { return layout_.shared.bytes + layout_.workspace.bytes; }

 private:
  std::uint32_t* epoch_of(int rank) {
    return layout_.workspace.epoch.at(memory_[static_cast<std::size_t>(rank)].workspace.get());
  }

  void reset(std::uint32_t epoch) {
    for (int rank = 0; rank < ranks_; ++rank) {
      RankMemory& memory = memory_[static_cast<std::size_t>(rank)];
      void* shared = memory.shared.get();
      std::fill_n(layout_.shared.ids_flags.at(shared), ranks_, epoch);
      std::fill_n(layout_.shared.x_flags.at(shared), ranks_, epoch);
      std::fill_n(layout_.shared.exit_flags.at(shared), ranks_, epoch);
      *layout_.shared.abort.at(shared) = 0;
      *epoch_of(rank) = epoch;
      const protocol::Place<std::uint32_t>& counters = layout_.workspace.counters;
      std::fill_n(counters.at(memory.workspace.get()), counters.count, 0u);
    }
  }

  void check(const EmulatedCall& call) const;
  void check_sizes(const EmulatedCall& call) const;
  void check_gradients(HostGradients& gradients, std::int64_t tokens) const;
  bool is_refused(const EmulatedCall& call) const {
    const auto& tokens = call.batch->tokens_per_rank;
    return std::any_of(tokens.begin(), tokens.end(), [&](std::int64_t t) { return t > layout_.geometry.max_tokens; });
  }
  void prepare_context(const EmulatedCall& call);
  std::unique_ptr<cpu::LogicalTime> make_logical_time() const;
  std::vector<RankCall> describe(const EmulatedCall& call, SharedShares& shares, std::vector<RankStats>& stats);
  void add_shared_shares(const EmulatedCall& call, const SharedShares& shares) const;
  void throw_on_failure(std::span<const EmulatedCall> calls, const RunState& run) const;
  void play(Sm& sm, const std::vector<std::vector<RankCall>>& calls);

  const std::uint64_t id_ = next_layer_id();
  LayerShape shape_;
  int ranks_;
  EmulatorOptions options_;
  Tuning tuning_;
  protocol::Layout layout_;
  std::vector<RankMemory> memory_;
  std::vector<void*> bases_;
  std::vector<TimelineEvent> timeline_;
  bool needs_recovery_ = false;
};

namespace {

void require_size(const char* name, std::size_t size, std::int64_t wanted) {
  if (size == static_cast<std::size_t>(wanted)) return;
  throw InputError(std::string(name) + " has " + plural(size, "element") + "; it must have " + std::to_string(wanted));
}

// Written buffers are resized; buffers that are added to must be there.
void prepare_buffer(const char* name, GradBuffer& buffer, const HostGradients& gradients, std::int64_t size) {
  const bool is_f32 = gradients.weight_grad_dtype == GradDtype::kFloat32;
  if (gradients.accumulate) {
    require_size(name, is_f32 ? buffer.f32.size() : buffer.bf16.size(), size);
  } else if (is_f32) {
    buffer.f32.resize(static_cast<std::size_t>(size));
  } else {
    buffer.bf16.resize(static_cast<std::size_t>(size));
  }
}

}  // namespace

void EmulatedLayer::Impl::check_gradients(HostGradients& gradients, std::int64_t tokens) const {
  const std::int64_t expert = shape_.hidden * shape_.intermediate;
  const std::int64_t shared = shape_.hidden * shape_.shared_intermediate;
  prepare_buffer("the gradient of gate_up", gradients.gate_up, gradients, shape_.experts * 2 * expert);
  prepare_buffer("the gradient of down", gradients.down, gradients, shape_.experts * expert);
  prepare_buffer("the gradient of shared_gate", gradients.shared_gate, gradients, shared);
  prepare_buffer("the gradient of shared_up", gradients.shared_up, gradients, shared);
  prepare_buffer("the gradient of shared_down", gradients.shared_down, gradients, shared);
  gradients.hidden_states.resize(static_cast<std::size_t>(tokens * shape_.hidden));
  gradients.topk_weights.resize(static_cast<std::size_t>(tokens * shape_.topk));
}

void EmulatedLayer::Impl::check_sizes(const EmulatedCall& call) const {
  const HostBatch& batch = *call.batch;
  const HostWeights& weights = *call.weights;
  const std::int64_t expert = shape_.hidden * shape_.intermediate;
  const std::int64_t shared = shape_.hidden * shape_.shared_intermediate;
  require_size("gate_up", weights.gate_up.size(), shape_.experts * 2 * expert);
  require_size("down", weights.down.size(), shape_.experts * expert);
  require_size("shared_gate", weights.shared_gate.size(), shared);
  require_size("shared_up", weights.shared_up.size(), shared);
  require_size("shared_down", weights.shared_down.size(), shared);
  require_size("tokens_per_rank", batch.tokens_per_rank.size(), ranks_);
  for (const std::int64_t tokens : batch.tokens_per_rank) {
    if (tokens < 0) throw InputError("tokens_per_rank holds " + std::to_string(tokens) + "; it must be 0 or more");
  }
  const std::int64_t tokens = batch.tokens();
  require_size("hidden_states", batch.hidden_states.size(), tokens * shape_.hidden);
  require_size("topk_ids", batch.topk_ids.size(), tokens * shape_.topk);
  require_size("topk_weights", batch.topk_weights.size(), tokens * shape_.topk);
  if (call.backward) require_size("grad_output", batch.grad_output.size(), tokens * shape_.hidden);
}

void EmulatedLayer::Impl::check(const EmulatedCall& call) const {
  if (call.weights == nullptr || call.batch == nullptr) throw InputError("a call needs weights and a batch");
  check_sizes(call);
  if (!call.backward) {
    if (call.output == nullptr) throw InputError("a forward call needs an output");
    return;
  }
  if (call.gradients == nullptr || call.context == nullptr) {
    throw InputError("a backward call needs gradients and the context that forward filled");
  }
  if (call.context->impl_ == nullptr || !call.context->impl_->is_filled) {
    throw InputError("the context of a backward call was not filled by a forward call");
  }
  const SavedContextImpl& context = *call.context->impl_;
  if (context.layer != id_) throw InputError("the context of a backward call belongs to another layer");
  if (context.tokens_per_rank != call.batch->tokens_per_rank || context.ids_hash != hash_ids(*call.batch)) {
    throw InputError("the context of a backward call is that of another batch: tokens_per_rank or topk_ids differ");
  }
}

void EmulatedLayer::Impl::prepare_context(const EmulatedCall& call) {
  if (call.context == nullptr || call.backward) return;
  if (call.context->impl_ == nullptr) *call.context = SavedContext();
  SavedContextImpl& context = *call.context->impl_;
  if (context.layer != id_) {
    context.ranks.clear();
    for (int rank = 0; rank < ranks_; ++rank) context.ranks.emplace_back(layout_.context.bytes);
    context.layer = id_;
  }
  context.tokens_per_rank = call.batch->tokens_per_rank;
  context.ids_hash = hash_ids(*call.batch);
  context.is_filled = !is_refused(call);
}

std::vector<RankCall> EmulatedLayer::Impl::describe(const EmulatedCall& call, SharedShares& shares,
                                                    std::vector<RankStats>& stats) {
  const std::int64_t tokens = call.batch->tokens();
  const std::int64_t hidden = shape_.hidden;
  const std::int64_t expert = hidden * shape_.intermediate;
  const std::int64_t shared = hidden * shape_.shared_intermediate;
  HostGradients* gradients = call.backward ? call.gradients : nullptr;
  if (gradients != nullptr) {
    check_gradients(*gradients, tokens);
    for (std::vector<float>* share : {&shares.gate, &shares.up, &shares.down}) {
      share->assign(static_cast<std::size_t>(ranks_ * shared), 0.0f);
    }
  } else {
    call.output->resize(static_cast<std::size_t>(tokens * hidden));
  }
  stats.assign(static_cast<std::size_t>(ranks_), {});

  std::vector<RankCall> result;
  std::int64_t first_token = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::int64_t first_expert = protocol::first_expert(layout_.geometry.experts, ranks_, rank);
    RankCall r;
    r.backward = call.backward;
    r.absent = rank == call.absent_rank;
    r.disagrees = rank == call.disagreeing_rank;
    r.saves = !call.backward && call.context != nullptr;
    r.tokens = call.batch->tokens_per_rank[static_cast<std::size_t>(rank)];
    r.x = call.batch->hidden_states.data() + first_token * hidden;
    r.ids = call.batch->topk_ids.data() + first_token * shape_.topk;
    r.weights = call.batch->topk_weights.data() + first_token * shape_.topk;
    r.gate_up = call.weights->gate_up.data() + first_expert * 2 * expert;
    r.down = call.weights->down.data() + first_expert * expert;
    r.shared_gate = call.weights->shared_gate.data();
    r.shared_up = call.weights->shared_up.data();
    r.shared_down = call.weights->shared_down.data();
    r.context = call.context != nullptr ? call.context->impl_->ranks[static_cast<std::size_t>(rank)].get()
                                        : memory_[static_cast<std::size_t>(rank)].context.get();
    if (gradients != nullptr) {
      const bool f32 = gradients->weight_grad_dtype == GradDtype::kFloat32;
      r.accumulate = gradients->accumulate;
      r.dout = call.batch->grad_output.data() + first_token * hidden;
      r.output = gradients->hidden_states.data() + first_token * hidden;
      r.grad_weights = gradients->topk_weights.data() + first_token * shape_.topk;
      r.grad_gate_up = {f32 ? gradients->gate_up.f32.data() + first_expert * 2 * expert : nullptr,
                        f32 ? nullptr : gradients->gate_up.bf16.data() + first_expert * 2 * expert};
      r.grad_down = {f32 ? gradients->down.f32.data() + first_expert * expert : nullptr,
                     f32 ? nullptr : gradients->down.bf16.data() + first_expert * expert};
      r.shared_grad_gate = shares.gate.data() + rank * shared;
      r.shared_grad_up = shares.up.data() + rank * shared;
      r.shared_grad_down = shares.down.data() + rank * shared;
    } else {
      r.output = call.output->data() + first_token * hidden;
    }
    r.stats = &stats[static_cast<std::size_t>(rank)];
    r.report = call.report;
    result.push_back(r);
    first_token += r.tokens;
  }
  if (call.report != nullptr) *call.report = empty_call_report(layout_.geometry, call.backward);
  return result;
}

void EmulatedLayer::Impl::add_shared_shares(const EmulatedCall& call, const SharedShares& shares) const {
  HostGradients& gradients = *call.gradients;
  // A buffer that is added to stays untouched without tokens: x + 0 could still turn -0 into 0.
  if (gradients.accumulate && call.batch->tokens() == 0) return;
  const std::size_t size = static_cast<std::size_t>(shape_.hidden * shape_.shared_intermediate);
  const auto add = [&](const std::vector<float>& share, GradBuffer& buffer) {
    for (std::size_t i = 0; i < size; ++i) {
      float sum = 0.0f;
      for (int rank = 0; rank < ranks_; ++rank) sum += share[static_cast<std::size_t>(rank) * size + i];
      if (gradients.weight_grad_dtype == GradDtype::kFloat32) {
        buffer.f32[i] = gradients.accumulate ? buffer.f32[i] + sum : sum;
      } else {
        buffer.bf16[i] = to_bf16(gradients.accumulate ? to_float(buffer.bf16[i]) + sum : sum);
      }
    }
  };
  add(shares.gate, gradients.shared_gate);
  add(shares.up, gradients.shared_up);
  add(shares.down, gradients.shared_down);
}

std::unique_ptr<cpu::LogicalTime> EmulatedLayer::Impl::make_logical_time() const {
  auto time = std::make_unique<cpu::LogicalTime>(ranks_, tuning_.sms);
  for (const RankMemory& memory : memory_) {
    void* shared = memory.shared.get();
    for (const auto& flags :
         {layout_.shared.ids_flags, layout_.shared.x_flags, layout_.shared.exit_flags, layout_.shared.abort}) {
      time->add_region(flags.at(shared), flags.count);
    }
    const protocol::Place<std::uint32_t>& counters = layout_.workspace.counters;
    time->add_region(counters.at(memory.workspace.get()), counters.count);
    time->add_region(&memory.launches, 1);
  }
  return time;
}

// One SM's life: call after call. Between two calls of a rank lies a barrier of its SMs, as between two launches.
void EmulatedLayer::Impl::play(Sm& sm, const std::vector<std::vector<RankCall>>& calls) {
  try {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const RankCall& call = calls[i][static_cast<std::size_t>(sm.rank())];
      if (call.absent) return;
      const std::int64_t begin = sm.wall_ns();
      sm.call = &call;
      sm.call_number = static_cast<int>(i);
      sm.epoch = *sm.own_workspace(layout_.workspace.epoch) + 1;
      sm.schedule = layout_.context.schedule(call.context);
      sm.watermark = 0;
      sm.hidden_watermark = 0;
      sm.x_is_staged = false;
      sm.barriers = 0;
      if (!cpu::enter(sm)) {
        cpu::abandon(sm);
      } else {
        if (!call.backward) cpu::build_schedule(sm);
        if (sm.communicates()) cpu::dispatch(sm);
        cpu::run_tasks(sm);
        cpu::leave(sm);
        cpu::merge(sm);
        cpu::finish(sm);
      }
      if (sm.index == 0) call.stats->seconds = static_cast<double>(sm.wall_ns() - begin) * 1e-9;
      sm.launch_boundary();
    }
  } catch (const cpu::Stopped&) {
  } catch (...) {
    {
      const std::lock_guard lock(sm.run.mutex);
      if (!sm.run.failure) sm.run.failure = std::current_exception();
    }
    for (int peer = 0; peer < ranks_; ++peer) sm.raise(sm.shared_of(peer, layout_.shared.abort), 1);
  }
}

void EmulatedLayer::Impl::throw_on_failure(std::span<const EmulatedCall> calls, const RunState& run) const {
  if (run.failure) std::rethrow_exception(run.failure);
  if (run.record) {
    const WaitRecord& r = *run.record;
    throw TimeoutError("rank " + std::to_string(r.rank) + ", SM " + std::to_string(r.sm) + " (" + r.role +
                           ") waited too long at " + r.phase + " for " + r.waiting_for + ": wanted " +
                           std::to_string(r.wanted) + ", saw " + std::to_string(r.seen),
                       r);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string where = "call " + std::to_string(i) + ": ";
    const int rank = run.verdict_ranks[i];
    if (run.verdicts[i] == protocol::EntryVerdict::kRefused) {
      const std::int64_t tokens = calls[i].batch->tokens_per_rank[static_cast<std::size_t>(rank)];
      throw InputError(where + "rank " + std::to_string(rank) + " has " + plural(tokens, "token") +
                       "; this layer takes at most " + std::to_string(layout_.geometry.max_tokens) + " a rank");
    }
    if (run.verdicts[i] == protocol::EntryVerdict::kMismatch) {
      throw Error(where + "rank " + std::to_string(rank) + " and rank 0 disagree on epoch, direction or configuration");
    }
    if (run.bad_routes[i] != protocol::kNoBadRoute) {
      const std::int64_t routes = layout_.geometry.max_tokens * shape_.topk;
      const std::int64_t rank_of = run.bad_routes[i] / routes;
      const std::int64_t route = run.bad_routes[i] % routes;
      std::int64_t first = 0;
      for (std::int64_t r = 0; r < rank_of; ++r) first += calls[i].batch->tokens_per_rank[static_cast<std::size_t>(r)];
      const std::int64_t id = calls[i].batch->topk_ids[static_cast<std::size_t>(first * shape_.topk + route)];
      throw InputError(where + "topk_ids of rank " + std::to_string(rank_of) + ", token " +
                       std::to_string(route / shape_.topk) + ", slot " + std::to_string(route % shape_.topk) + " is " +
                       std::to_string(id) + "; it must be -1 to " + std::to_string(shape_.experts - 1));
    }
  }
}

void EmulatedLayer::Impl::run(std::span<const EmulatedCall> calls) {
  if (needs_recovery_) throw Error("an earlier run stopped half-way; recover() the layer first");
  std::vector<std::vector<RankCall>> rank_calls;
  std::vector<SharedShares> shares(calls.size());
  std::vector<std::vector<RankStats>> stats(calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    check(calls[i]);
    prepare_context(calls[i]);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) rank_calls.push_back(describe(calls[i], shares[i], stats[i]));

  for (RankMemory& memory : memory_) memory.launches = 0;
  RunState run;
  run.start = std::chrono::steady_clock::now();
  run.verdicts.assign(calls.size(), protocol::EntryVerdict::kGo);
  run.verdict_ranks.assign(calls.size(), -1);
  run.bad_routes.assign(calls.size(), protocol::kNoBadRoute);

  if (options_.timeline) run.time = make_logical_time();

  std::vector<std::unique_ptr<Sm>> sms;
  for (int rank = 0; rank < ranks_; ++rank) {
    const protocol::PointerTable peers{rank, ranks_, bases_.data()};
    for (int index = 0; index < tuning_.sms; ++index) {
      sms.push_back(std::make_unique<Sm>(layout_, options_, shape_, tuning_, peers,
                                         memory_[static_cast<std::size_t>(rank)], run, index));
    }
  }
  std::vector<std::thread> threads;
  for (auto& sm : sms) threads.emplace_back([this, &sm, &rank_calls] { play(*sm, rank_calls); });
  for (std::thread& thread : threads) thread.join();

  timeline_.clear();
  for (auto& sm : sms) timeline_.insert(timeline_.end(), sm->events.begin(), sm->events.end());
  needs_recovery_ = run.record.has_value() || run.failure != nullptr;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const bool was_done = !needs_recovery_ && run.verdicts[i] == protocol::EntryVerdict::kGo;
    if (!calls[i].backward && calls[i].context != nullptr) calls[i].context->impl_->is_filled = was_done;
    if (calls[i].report != nullptr) calls[i].report->ranks = stats[i];
    // The context may be that of an earlier call of this run which all ranks gave up.
    if (calls[i].backward && was_done && calls[i].context->impl_->is_filled) add_shared_shares(calls[i], shares[i]);
  }
  throw_on_failure(calls, run);
}

EmulatedLayer::EmulatedLayer(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning,
                             const EmulatorOptions& options)
    : impl_(std::make_unique<Impl>(shape, ranks, max_tokens, tuning, options)) {}
EmulatedLayer::~EmulatedLayer() = default;

void EmulatedLayer::run(std::span<const EmulatedCall> calls) { impl_->run(calls); }

void EmulatedLayer::forward(const HostWeights& weights, const HostBatch& batch, std::vector<Bf16>& output,
                            SavedContext* context, CallReport* report) {
  EmulatedCall call;
  call.weights = &weights;
  call.batch = &batch;
  call.output = &output;
  call.context = context;
  call.report = report;
  impl_->run({&call, 1});
}

void EmulatedLayer::backward(const HostWeights& weights, const HostBatch& batch, SavedContext& context,
                             HostGradients& gradients, CallReport* report) {
  EmulatedCall call;
  call.backward = true;
  call.weights = &weights;
  call.batch = &batch;
  call.gradients = &gradients;
  call.context = &context;
  call.report = report;
  impl_->run({&call, 1});
}

void EmulatedLayer::recover() { impl_->recover(); }
const LayerShape& EmulatedLayer::shape() const { return impl_->shape(); }
const Tuning& EmulatedLayer::tuning() const { return impl_->tuning(); }
std::int64_t EmulatedLayer::workspace_bytes() const { return impl_->workspace_bytes(); }
const std::vector<TimelineEvent>& EmulatedLayer::timeline() const { return impl_->timeline(); }

}  // namespace moewave
