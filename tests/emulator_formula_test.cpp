// The definition of the layer, term by term and bit by bit: what is rounded where, in which order routes are summed,
// and what the shared expert adds. Terms come from layers of one route, so that no sum is hidden in them.
#include <gtest/gtest.h>

#include <cmath>

#include "support/emulated.h"

namespace moewave::test {
namespace {

LayerCase without_shared(LayerCase c) {
  c.shape.shared_intermediate = 0;
  c.shape.shared_clamp.reset();
  c.weights.shared_gate.clear();
  c.weights.shared_up.clear();
  c.weights.shared_down.clear();
  return c;
}

// The case with slot `slot` of each token as its only route, with the router weight that it has, or with 1.
LayerCase one_slot(const LayerCase& c, std::int64_t slot, bool weight_one) {
  LayerCase result = without_shared(c);
  result.shape.topk = 1;
  result.batch.topk_ids.clear();
  result.batch.topk_weights.clear();
  for (std::int64_t token = 0; token < c.batch.tokens(); ++token) {
    const std::size_t at = static_cast<std::size_t>(token * c.shape.topk + slot);
    result.batch.topk_ids.push_back(c.batch.topk_ids[at]);
    result.batch.topk_weights.push_back(weight_one ? 1.0f : c.batch.topk_weights[at]);
  }
  return result;
}

LayerCase shared_alone(LayerCase c) {
  route(c, [](std::int64_t, std::int64_t) { return -1; });
  return c;
}

std::vector<float> start_sums(const LayerCase& c, const std::vector<Bf16>& shared) {
  std::vector<float> sums(c.batch.hidden_states.size(), 0.0f);
  for (std::size_t i = 0; c.shape.shared_intermediate > 0 && i < sums.size(); ++i) sums[i] = to_float(shared[i]);
  return sums;
}

std::vector<Bf16> rounded(const std::vector<float>& sums) {
  std::vector<Bf16> result;
  for (const float sum : sums) result.push_back(to_bf16(sum));
  return result;
}

// B99, B117, B156: routes are summed in FP32 in the order of their slots, each by one fused multiply-add with the FP32
// weight, the shared expert first and once, and the sum is rounded once.
void expect_formula(const LayerCase& c) {
  const Results results = run_case(c, tiny_ring());
  const Results shared = run_case(shared_alone(c));
  std::vector<float> output = start_sums(c, shared.output);
  std::vector<float> dx = start_sums(c, shared.gradients.hidden_states);
  const std::size_t hidden = static_cast<std::size_t>(c.shape.hidden);
  for (std::int64_t slot = 0; slot < c.shape.topk; ++slot) {
    const Results y = run_case(one_slot(c, slot, true));
    const Results weighted = run_case(one_slot(c, slot, false));
    for (std::size_t i = 0; i < output.size(); ++i) {
      const std::size_t at = i / hidden * static_cast<std::size_t>(c.shape.topk) + static_cast<std::size_t>(slot);
      if (c.batch.topk_ids[at] < 0) continue;
      output[i] = std::fma(c.batch.topk_weights[at], to_float(y.output[i]), output[i]);
      dx[i] += to_float(weighted.gradients.hidden_states[i]);
    }
  }
  expect_same_bits("output", results.output, rounded(output));
  expect_same_bits("grad_hidden_states", results.gradients.hidden_states, rounded(dx));
}

TEST(EmulatorFormula, RoutesAreSummedInFp32BySlotAndRoundedOnce) {
  for (const std::int64_t topk : {1, 2, 8}) {
    LayerCase c = marked_case(make_shape(64, 48, 9, topk), {40, 31, 0}, 80);
    for (std::size_t i = 0; i < c.batch.topk_weights.size(); ++i) {
      const float weights[] = {1.0f / 3, 1.0f + 1.0f / 4096, -0.1f, 0.7f, 0.0f};
      c.batch.topk_weights[i] = weights[i % 5];
    }
    expect_formula(c);
  }
}

TEST(EmulatorFormula, TheSharedExpertIsAddedFirstExactlyOnceAndUnscaled) {
  LayerCase c = marked_case(make_shape(64, 48, 6, 3, 40), {40, 31}, 81);
  mask_routes(c, 25, 5);
  expect_formula(c);
}

// B117 alone: with one route the result is the product of the FP32 weight and y, rounded once.
TEST(EmulatorFormula, RouterWeightsStayFp32) {
  LayerCase c = marked_case(make_shape(64, 48, 4, 1), {20, 20}, 82);
  const Results y = run_case(one_slot(c, 0, true));
  for (const float weight : {1.0f / 3, 1.0f + 1.0f / 4096, 1.0f - 1.0f / 512}) {
    c.batch.topk_weights.assign(c.batch.topk_weights.size(), weight);
    const Results results = run_case(c);
    for (std::size_t i = 0; i < results.output.size(); ++i) {
      ASSERT_EQ(results.output[i].bits, to_bf16(weight * to_float(y.output[i])).bits);
    }
  }
}

// One token, one route, one-hot matrices: every product is exact, so that only the roundings are left.
TEST(EmulatorFormula, RoundingHappensWhereTheDefinitionSaysAndNowhereElse) {
  constexpr std::size_t kSize = 8;
  LayerCase c;
  c.shape = make_shape(kSize, kSize, 1, 1);
  c.weights.gate_up.resize(2 * kSize * kSize);
  c.weights.down.resize(kSize * kSize);
  c.batch.tokens_per_rank = {1};
  c.batch.hidden_states.resize(kSize);
  c.batch.grad_output.resize(kSize);
  c.batch.topk_ids = {0};
  c.batch.topk_weights = {1.0f + 1.0f / 4096};
  const float weight = c.batch.topk_weights[0];
  // x = (1, 2^-9): g = 1.5 + 3 * 2^-9 and u = 1.25 + 3 * 2^-9 do not fit BF16.
  c.batch.hidden_states[0] = to_bf16(1.0f);
  c.batch.hidden_states[1] = to_bf16(1.0f / 512);
  c.weights.gate_up[0] = to_bf16(1.5f);
  c.weights.gate_up[1] = to_bf16(3.0f);
  c.weights.gate_up[kSize * kSize] = to_bf16(1.25f);
  c.weights.gate_up[kSize * kSize + 1] = to_bf16(3.0f);
  // y[0] = h, y[1] = 2^-9 h; dOut = (1, 1): dh = 1 + 2^-9 does not fit BF16 and must not be rounded.
  c.weights.down[0] = to_bf16(1.0f);
  c.weights.down[kSize] = to_bf16(1.0f / 512);
  c.batch.grad_output[0] = to_bf16(1.0f);
  c.batch.grad_output[1] = to_bf16(1.0f);
  const Results results = run_case(c);

  const double g = static_cast<double>(to_float(to_bf16(1.5f + 3.0f / 512)));
  const double u = static_cast<double>(to_float(to_bf16(1.25f + 3.0f / 512)));
  const double sigmoid = 1 / (1 + std::exp(-g));
  const auto round = [](double value) { return to_float(to_bf16(static_cast<float>(value))); };
  const float h = round(g * sigmoid * u);
  EXPECT_NE(h, round((1.5 + 3.0 / 512) / (1 + std::exp(-1.5 - 3.0 / 512)) * (1.25 + 3.0 / 512)));  // g, u unrounded
  EXPECT_EQ(to_float(results.output[0]), round(static_cast<double>(weight) * static_cast<double>(h)));

  const float dh = 1.0f + 1.0f / 512;
  EXPECT_EQ(results.gradients.topk_weights[0], dh * h);
  const double weighted_dh = static_cast<double>(weight * dh);
  EXPECT_EQ(results.gradients.gate_up.f32[0], round(weighted_dh * u * sigmoid * (1 + g * (1 - sigmoid))));
  EXPECT_EQ(results.gradients.gate_up.f32[kSize * kSize], round(weighted_dh * g * sigmoid));
  EXPECT_EQ(results.gradients.down.f32[0], round(static_cast<double>(weight) * static_cast<double>(h)));
}

// B115: eight equal experts weighted by 1/8 each are one expert.
TEST(EmulatorCombine, EightEqualExpertsAreOneExpertBitForBit) {
  for (const int ranks : {1, 2, 4, 8}) {
    LayerCase c = random_case(make_shape(128, 64, 8, 8), even_split(50, ranks), 83);
    const std::size_t size = 128 * 64;
    for (std::size_t i = size * 2; i < c.weights.gate_up.size(); ++i)
      c.weights.gate_up[i] = c.weights.gate_up[i - 2 * size];
    for (std::size_t i = size; i < c.weights.down.size(); ++i) c.weights.down[i] = c.weights.down[i - size];
    c.batch.topk_weights.assign(c.batch.topk_weights.size(), 0.125f);
    expect_same_bits("output", run_case(c).output, run_case(one_slot(c, 0, true)).output);
  }
}

// B123: no growth of the error with the number of tokens beyond what more samples explain.
TEST(EmulatorCombine, ErrorDoesNotGrowWithTheNumberOfTokens) {
  const auto error = [](std::int64_t tokens) {
    const LayerCase c = random_case(make_shape(64, 32, 8, 4), {tokens, tokens}, 84);
    const Results results = run_case(c, tiny_ring());
    return measure(widen(results.output), run_reference(c.shape, c.weights, c.batch, false).output, 64);
  };
  const TensorError few = error(64);
  const TensorError many = error(3000);
  EXPECT_LT(error(1).frobenius, 2 * few.frobenius);
  EXPECT_LT(many.frobenius, 1.2 * few.frobenius);
  EXPECT_LT(many.worst_row, 3 * few.worst_row);
}

// ---- Shared expert

// B154.
TEST(EmulatorSharedExpert, RoutedWeightsOfZeroLeaveItAlone) {
  LayerCase c = marked_case(make_shape(64, 48, 6, 2, 72), {33, 50}, 85);
  c.batch.topk_weights.assign(c.batch.topk_weights.size(), 0.0f);
  const Results results = expect_two_steps_match(c);
  expect_same_bits("output", results.output, run_case(shared_alone(c)).output);
}

TEST(EmulatorSharedExpert, TheSameTokensOverAnyRanksHaveTheSameBits) {
  const LayerCase c = marked_case(make_shape(64, 48, 6, 2, 72), {200}, 86);
  const Results wanted = expect_two_steps_match(c);
  for (const int ranks : {2, 4, 5}) {
    const LayerCase spread = split(c, even_split(200, ranks));
    expect_same_token_results(expect_two_steps_match(spread), wanted);
  }
}

// B158: I 48; an expert narrower, equally wide, twice as wide, 256 wider.
TEST(EmulatorSharedExpert, MayHaveAnyWidth) {
  for (const std::int64_t width : {8, 24, 48, 96, 48 + 256}) {
    LayerCase c = marked_case(make_shape(64, 48, 6, 2, width), {150, 21}, 87);
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) expect_two_steps_match(c, setup);
    expect_formula(c);
  }
}

TEST(EmulatorSharedExpert, IsThereForRanksWithoutRoutedExperts) {
  const LayerCase c = marked_case(make_shape(64, 48, 2, 1, 40), {20, 30, 140, 0}, 88);
  expect_two_steps_match(c, tiny_ring());
}

}  // namespace
}  // namespace moewave::test
