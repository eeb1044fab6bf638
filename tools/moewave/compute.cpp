#include "compute.h"

#include <algorithm>
#include <chrono>

#include "progress.h"

namespace moewave::cli {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<Bf16> to_bf16_tensor(const std::vector<double>& values) {
  std::vector<Bf16> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(),
                 [](double value) { return to_bf16(static_cast<float>(value)); });
  return result;
}

std::vector<float> to_f32_tensor(const std::vector<double>& values) {
  std::vector<float> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](double value) { return static_cast<float>(value); });
  return result;
}

}  // namespace

RunResult run_emulator(const Problem& problem, const RunOptions& options) {
  EmulatorOptions emulator;
  emulator.jitter_seed = options.seed;
  emulator.jitter_us = options.jitter_us;
  emulator.poison = options.poison;
  emulator.saved_rows = options.saved_rows;
  emulator.timeline = !options.timeline.empty();

  RunResult result;
  SavedContext context;
  result.calls.resize(options.backward ? 2 : 1);
  std::vector<EmulatedCall> calls(result.calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    calls[i].weights = &problem.weights;
    calls[i].batch = &problem.batch;
    calls[i].report = &result.calls[i];
    if (options.backward) calls[i].context = &context;
  }
  calls[0].output = &result.output;
  if (options.backward) {
    result.gradients.emplace();
    calls[1].backward = true;
    calls[1].gradients = &*result.gradients;
  }

  EmulatedLayer layer(problem.shape, problem.ranks, problem.max_tokens(), options.tuning, emulator);
  {
    const Progress progress(options.backward ? "emulator, forward and backward" : "emulator, forward");
    const auto start = std::chrono::steady_clock::now();
    layer.run(calls);
    result.seconds = seconds_since(start);
  }
  result.tuning = layer.tuning();
  result.workspace_bytes = layer.workspace_bytes();
  if (options.backward) result.saved_bytes = context.bytes();
  if (emulator.timeline) result.timeline = layer.timeline();
  return result;
}

ReferenceResult reference_with_progress(const Problem& problem, bool backward) {
  Progress progress("FP64 reference");
  return run_reference(
      problem.shape, problem.weights, problem.batch, backward,
      [](double share, void* user) { static_cast<Progress*>(user)->set_share(share); }, &progress);
}

RunResult rounded(const ReferenceResult& reference, bool backward) {
  RunResult result;
  result.output = to_bf16_tensor(reference.output);
  if (!backward) return result;
  HostGradients& gradients = result.gradients.emplace();
  gradients.hidden_states = to_bf16_tensor(reference.grad_hidden_states);
  gradients.topk_weights = to_f32_tensor(reference.grad_topk_weights);
  gradients.gate_up.f32 = to_f32_tensor(reference.grad_gate_up);
  gradients.down.f32 = to_f32_tensor(reference.grad_down);
  gradients.shared_gate.f32 = to_f32_tensor(reference.grad_shared_gate);
  gradients.shared_up.f32 = to_f32_tensor(reference.grad_shared_up);
  gradients.shared_down.f32 = to_f32_tensor(reference.grad_shared_down);
  return result;
}

}  // namespace moewave::cli
