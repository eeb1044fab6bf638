// Running a case on the emulator and holding the results against the FP64 reference or against another run.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "moewave/host_layer.h"
#include "support/layer_case.h"
#include "support/tensor_error.h"

namespace moewave::test {

/// How a layer is set up. Few SMs: an emulated SM is a thread, and two machine cores carry all ranks.
struct LayerSetup {
  Tuning tuning = {.sms = 3, .comm_sms = 1};
  EmulatorOptions options = {.poison = true};
  std::int64_t max_tokens = -1;  // -1: as many as the case has
};

/// The smallest ring there is: two segments of one block of tokens each, one tile a minibatch.
inline LayerSetup tiny_ring() {
  LayerSetup setup;
  setup.tuning.minibatch_rows = 1;
  setup.tuning.ring_tokens = 1;
  setup.tuning.ring_rows = 1;
  return setup;
}

inline EmulatedLayer make_layer(const LayerCase& layer_case, const LayerSetup& setup = {}) {
  const std::int64_t max_tokens = setup.max_tokens < 0 ? layer_case.max_tokens() : setup.max_tokens;
  return EmulatedLayer(layer_case.shape, layer_case.ranks(), max_tokens, setup.tuning, setup.options);
}

/// Where one forward and one backward call of a case leave everything.
struct Results {
  SavedContext context;
  std::vector<Bf16> output;
  HostGradients gradients;
  CallReport forward_report;
  CallReport backward_report;

  /// Buffers of the right size full of NaN: what a call should have written and did not, shows.
  explicit Results(const LayerCase& c, GradDtype dtype = GradDtype::kFloat32) {
    const auto fill = [&](GradBuffer& buffer, std::size_t size) {
      if (dtype == GradDtype::kFloat32) buffer.f32.assign(size, std::numeric_limits<float>::quiet_NaN());
      if (dtype == GradDtype::kBf16) buffer.bf16.assign(size, Bf16{0xffff});
    };
    gradients.weight_grad_dtype = dtype;
    output.assign(c.batch.hidden_states.size(), Bf16{0xffff});
    gradients.hidden_states.assign(c.batch.hidden_states.size(), Bf16{0xffff});
    gradients.topk_weights.assign(c.batch.topk_weights.size(), std::numeric_limits<float>::quiet_NaN());
    fill(gradients.gate_up, c.weights.gate_up.size());
    fill(gradients.down, c.weights.down.size());
    fill(gradients.shared_gate, c.weights.shared_gate.size());
    fill(gradients.shared_up, c.weights.shared_up.size());
    fill(gradients.shared_down, c.weights.shared_down.size());
  }
};

inline EmulatedCall forward_call(const LayerCase& c, Results& results) {
  EmulatedCall call;
  call.weights = &c.weights;
  call.batch = &c.batch;
  call.context = &results.context;
  call.output = &results.output;
  call.report = &results.forward_report;
  return call;
}

inline EmulatedCall backward_call(const LayerCase& c, Results& results) {
  EmulatedCall call;
  call.backward = true;
  call.weights = &c.weights;
  call.batch = &c.batch;
  call.context = &results.context;
  call.gradients = &results.gradients;
  call.report = &results.backward_report;
  return call;
}

/// Forward and backward of one case, back to back.
inline void run_step(EmulatedLayer& layer, const LayerCase& c, Results& results) {
  const std::vector<EmulatedCall> calls = {forward_call(c, results), backward_call(c, results)};
  layer.run(calls);
}

inline Results run_step(EmulatedLayer& layer, const LayerCase& c) {
  Results results(c);
  run_step(layer, c, results);
  return results;
}

inline Results run_case(const LayerCase& c, const LayerSetup& setup = {}) {
  EmulatedLayer layer = make_layer(c, setup);
  return run_step(layer, c);
}

/// What has the same bits however the work is cut and spread.
inline void expect_same_token_results(const Results& got, const Results& wanted) {
  expect_same_bits("output", got.output, wanted.output);
  expect_same_bits("grad_hidden_states", got.gradients.hidden_states, wanted.gradients.hidden_states);
  expect_same_bits("grad_topk_weights", got.gradients.topk_weights, wanted.gradients.topk_weights);
}

inline void expect_same_buffer(const std::string& name, const GradBuffer& got, const GradBuffer& wanted) {
  expect_same_bits(name, got.f32, wanted.f32);
  expect_same_bits(name, got.bf16, wanted.bf16);
}

inline void expect_same_weight_gradients(const Results& got, const Results& wanted) {
  expect_same_buffer("grad_gate_up", got.gradients.gate_up, wanted.gradients.gate_up);
  expect_same_buffer("grad_down", got.gradients.down, wanted.gradients.down);
  expect_same_buffer("grad_shared_gate", got.gradients.shared_gate, wanted.gradients.shared_gate);
  expect_same_buffer("grad_shared_up", got.gradients.shared_up, wanted.gradients.shared_up);
  expect_same_buffer("grad_shared_down", got.gradients.shared_down, wanted.gradients.shared_down);
}

inline void expect_same_results(const Results& got, const Results& wanted) {
  expect_same_token_results(got, wanted);
  expect_same_weight_gradients(got, wanted);
}

/// Each tensor by itself, within the bounds that the layer promises for BF16.
inline void expect_matches(const LayerCase& c, const Results& results, const ReferenceResult& reference) {
  constexpr double kTokenBound = 5e-3;
  constexpr double kGradientBound = 1e-2;
  const LayerShape& shape = c.shape;
  const HostGradients& gradients = results.gradients;
  expect_close("output", widen(results.output), reference.output, shape.hidden, kTokenBound);
  expect_close("grad_hidden_states", widen(gradients.hidden_states), reference.grad_hidden_states, shape.hidden,
               kTokenBound);
  expect_close("grad_topk_weights", widen(gradients.topk_weights), reference.grad_topk_weights, shape.topk,
               kGradientBound);
  expect_close("grad_gate_up", widen(gradients.gate_up.f32), reference.grad_gate_up, shape.hidden, kGradientBound);
  expect_close("grad_down", widen(gradients.down.f32), reference.grad_down, shape.intermediate, kGradientBound);
  expect_close("grad_shared_gate", widen(gradients.shared_gate.f32), reference.grad_shared_gate, shape.hidden,
               kGradientBound);
  expect_close("grad_shared_up", widen(gradients.shared_up.f32), reference.grad_shared_up, shape.hidden,
               kGradientBound);
  expect_close("grad_shared_down", widen(gradients.shared_down.f32), reference.grad_shared_down,
               shape.shared_intermediate, kGradientBound);
}

inline void expect_matches(const LayerCase& c, const Results& results) {
  expect_matches(c, results, run_reference(c.shape, c.weights, c.batch, true));
}

/// Two steps back to back on one layer: several kinds of fault show only in the second.
inline Results expect_two_steps_match(EmulatedLayer& layer, const LayerCase& c) {
  Results first(c);
  Results second(c);
  const std::vector<EmulatedCall> calls = {forward_call(c, first), backward_call(c, first), forward_call(c, second),
                                           backward_call(c, second)};
  layer.run(calls);
  expect_matches(c, second);
  expect_same_results(first, second);
  return second;
}

inline Results expect_two_steps_match(const LayerCase& c, const LayerSetup& setup = {}) {
  EmulatedLayer layer = make_layer(c, setup);
  return expect_two_steps_match(layer, c);
}

}  // namespace moewave::test
