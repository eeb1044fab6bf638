// Promises where something is empty: an expert, a rank, or everything.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

std::int64_t elements_of_expert(const LayerShape& shape) { return shape.hidden * shape.intermediate; }

void expect_no_gradient_of_experts(const LayerCase& c, const Results& results, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = elements_of_expert(c.shape);
  expect_zeros("grad_gate_up", results.gradients.gate_up.f32, begin * 2 * size, end * 2 * size);
  expect_zeros("grad_down", results.gradients.down.f32, begin * size, end * size);
}

// B01, B09, B13.
TEST(EmulatorZeroTokens, ARankWhoseExpertsGetNothingReturnsZeroGradientsAndItsTokensTheirResults) {
  LayerCase c = marked_case(make_shape(256, 512, 8, 2), {64, 64}, 1);
  route_within(c, 0, 4);  // all of them on rank 0
  for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
    const Results results = expect_two_steps_match(c, setup);
    expect_no_gradient_of_experts(c, results, 4, 8);
    EXPECT_EQ(results.forward_report.ranks[1].rows, 0);
  }
}

// B01: main_grad of experts without rows stays as it is, -0 and NaN patterns included.
TEST(EmulatorZeroTokens, BuffersOfExpertsWithoutRowsStayUntouchedWhenAdding) {
  LayerCase c = marked_case(make_shape(64, 40, 6, 2), {20, 0, 33}, 2);
  route(c, [](std::int64_t token, std::int64_t slot) { return (token + slot) % 2 == 0 ? 1 : 4; });
  const std::int64_t size = elements_of_expert(c.shape);
  for (const GradDtype dtype : {GradDtype::kFloat32, GradDtype::kBf16}) {
    EmulatedLayer layer = make_layer(c);
    Results results(c, dtype);
    results.gradients.accumulate = true;
    const float values[] = {-0.0f, 1.5f, std::numeric_limits<float>::signaling_NaN()};
    const auto fill = [&](GradBuffer& buffer) {
      for (std::size_t i = 0; i < buffer.f32.size(); ++i) buffer.f32[i] = values[i % 3];
      for (std::size_t i = 0; i < buffer.bf16.size(); ++i)
        buffer.bf16[i] = Bf16{i % 2 == 0 ? std::uint16_t{0x8000} : std::uint16_t{0x7f81}};
    };
    fill(results.gradients.gate_up);
    fill(results.gradients.down);
    const GradBuffer gate_up = results.gradients.gate_up;
    const GradBuffer down = results.gradients.down;
    run_step(layer, c, results);
    const auto expect_untouched = [&](const GradBuffer& got, const GradBuffer& wanted, std::int64_t expert,
                                      std::int64_t expert_size) {
      const auto part = [&](const auto& values_of_all) {
        return values_of_all.empty() ? values_of_all : row_of(values_of_all, expert, expert_size);
      };
      expect_same_bits("gradient of an expert without rows", part(got.f32), part(wanted.f32));
      expect_same_bits("gradient of an expert without rows", part(got.bf16), part(wanted.bf16));
    };
    for (const std::int64_t expert : {0, 2, 3, 5}) {
      expect_untouched(results.gradients.gate_up, gate_up, expert, 2 * size);
      expect_untouched(results.gradients.down, down, expert, size);
    }
  }
}

TEST(EmulatorZeroTokens, WithoutAnyTokenSharedBuffersStayUntouchedWhenAddingAndAreZeroWhenWritten) {
  const LayerCase c = random_case(make_shape(32, 16, 4, 2, 24), {0, 0}, 3);
  Results added(c);
  added.gradients.accumulate = true;
  const std::vector<float> minus_zeros(c.weights.shared_gate.size(), -0.0f);
  for (GradBuffer* buffer : {&added.gradients.gate_up, &added.gradients.down, &added.gradients.shared_gate,
                             &added.gradients.shared_up, &added.gradients.shared_down}) {
    buffer->f32.assign(buffer->f32.size(), -0.0f);
  }
  EmulatedLayer layer = make_layer(c);
  run_step(layer, c, added);
  expect_same_bits("shared_gate", added.gradients.shared_gate.f32, minus_zeros);
  expect_same_bits("shared_up", added.gradients.shared_up.f32, minus_zeros);
  expect_same_bits("shared_down", added.gradients.shared_down.f32, minus_zeros);

  const Results written = run_step(layer, c);
  expect_no_gradient_of_experts(c, written, 0, 4);
  const std::int64_t size = static_cast<std::int64_t>(minus_zeros.size());
  expect_zeros("shared_gate", written.gradients.shared_gate.f32, 0, size);
  expect_zeros("shared_up", written.gradients.shared_up.f32, 0, size);
  expect_zeros("shared_down", written.gradients.shared_down.f32, 0, size);
}

// B03: I = 40 is the nearest legal size to the odd 43 of the report.
TEST(EmulatorZeroTokens, UnusedExpertsHaveZeroGradientsAndUsedOnesTheirOwn) {
  LayerCase c = marked_case(make_shape(64, 40, 18, 2), {64, 64}, 4);
  route_within(c, 0, 6);
  const Results results = expect_two_steps_match(c);
  expect_no_gradient_of_experts(c, results, 6, 18);
}

// B05, B39: counts per expert, first, middle and last ones empty, after other work that left its traces.
TEST(EmulatorZeroTokens, EmptyExpertsAmongFullOnesDisturbNothingWhateverRanBefore) {
  const std::vector<std::int64_t> counts = {0, 8, 8, 0, 16, 0};
  LayerCase c = marked_case(make_shape(64, 48, 6, 1), {20, 12}, 5);
  std::vector<std::int64_t> expert_of;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    expert_of.insert(expert_of.end(), static_cast<std::size_t>(counts[expert]), static_cast<std::int64_t>(expert));
  }
  route(c, [&](std::int64_t token, std::int64_t) { return expert_of[static_cast<std::size_t>(token * 7 % 32)]; });
  const ReferenceResult reference = run_reference(c.shape, c.weights, c.batch, true);
  for (const bool poison : {true, false}) {
    LayerSetup setup;
    setup.options.poison = poison;
    setup.max_tokens = 150;
    EmulatedLayer layer = make_layer(c, setup);
    for (std::uint64_t repeat = 0; repeat < 20; ++repeat) {
      const std::int64_t tokens = static_cast<std::int64_t>(repeat * 37 % 151);
      const LayerCase before = random_case(c.shape, {tokens, 150 - tokens}, 100 + repeat);
      run_step(layer, before);
      const Results results = run_step(layer, c);
      expect_matches(c, results, reference);
      for (const std::int64_t expert : {0, 3, 5}) expect_no_gradient_of_experts(c, results, expert, expert + 1);
      EXPECT_EQ(results.forward_report.expert_rows, counts);
    }
  }
}

// B11: vectors without elements, hence null pointers.
TEST(EmulatorZeroTokens, NoTokenAnywhereGivesEmptyOutputsAndTheLayerGoesOn) {
  const LayerCase empty = random_case(make_shape(64, 32, 5, 2, 16), {0, 0, 0}, 6);
  const LayerCase full = random_case(empty.shape, {30, 0, 70}, 7);
  for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
    setup.max_tokens = 70;
    EmulatedLayer layer = make_layer(full, setup);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Results results = expect_two_steps_match(layer, empty);
      EXPECT_TRUE(results.output.empty());
      EXPECT_TRUE(results.gradients.hidden_states.empty());
      expect_no_gradient_of_experts(empty, results, 0, 5);
      expect_two_steps_match(layer, full);
    }
  }
}

TEST(EmulatorZeroTokens, ALayerMadeForNoTokensRuns) {
  expect_two_steps_match(random_case(make_shape(32, 16, 3, 2), {0, 0}, 8));
  expect_two_steps_match(random_case(make_shape(32, 16, 3, 2), {0}, 9));
}

TEST(EmulatorZeroTokens, AllRoutesMaskedGiveZerosOrTheSharedExpertAlone) {
  LayerCase c = random_case(make_shape(32, 16, 4, 2), {9, 40}, 10);
  route(c, [](std::int64_t, std::int64_t) { return -1; });
  for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
    const Results results = expect_two_steps_match(c, setup);
    expect_zeros("output", results.output, 0, 49 * 32);
    expect_zeros("grad_hidden_states", results.gradients.hidden_states, 0, 49 * 32);
    expect_zeros("grad_topk_weights", results.gradients.topk_weights, 0, 49 * 2);
    expect_no_gradient_of_experts(c, results, 0, 4);
  }
  LayerCase shared = random_case(make_shape(32, 16, 4, 2, 24), {9, 40}, 10);
  shared.batch.topk_ids = c.batch.topk_ids;
  expect_two_steps_match(shared);
}

// B15: 30 of 32 experts are empty; T = 1.
TEST(EmulatorZeroTokens, ASingleTokenIsRight) {
  for (const Tokens& tokens : {Tokens{1}, Tokens{1, 0}, Tokens{0, 1}, Tokens{0, 0, 1, 0}}) {
    const LayerCase c = marked_case(make_shape(128, 64, 32, 2), tokens, 11);
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) expect_two_steps_match(c, setup);
  }
}

TEST(EmulatorZeroTokens, RanksWithoutTokensAndRanksWithoutExpertsTakePart) {
  for (const Tokens& tokens : {Tokens{0, 50, 0, 3, 0}, Tokens{40, 0, 0, 0, 1}, Tokens{0, 0, 0, 0, 77}}) {
    const LayerCase c = marked_case(make_shape(64, 32, 3, 2), tokens, 12);  // ranks 3 and 4 own no expert
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) expect_two_steps_match(c, setup);
  }
}

}  // namespace
}  // namespace moewave::test
