// Promises of the FP64 reference. What it is held against is written out here a second time, as scalar loops over
// tokens, and, for gradients, as differences of those loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "moewave/host_layer.h"

namespace moewave {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- A second implementation, forward only, in doubles
// -----------------------------------------------------------------

std::vector<double> widen(const std::vector<Bf16>& values) {
  std::vector<double> result;
  for (const Bf16 value : values) result.push_back(static_cast<double>(to_float(value)));
  return result;
}

struct PlainInputs {
  std::vector<double> gate_up, down, shared_gate, shared_up, shared_down, x, topk_weights;
  std::vector<std::int32_t> ids;

  PlainInputs(const HostWeights& w, const HostBatch& b)
      : gate_up(widen(w.gate_up)),
        down(widen(w.down)),
        shared_gate(widen(w.shared_gate)),
        shared_up(widen(w.shared_up)),
        shared_down(widen(w.shared_down)),
        x(widen(b.hidden_states)),
        topk_weights(b.topk_weights.begin(), b.topk_weights.end()),
        ids(b.topk_ids) {}
};

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// out += scale * FFN(x) of one token.
void add_ffn(const double* x, const double* gate, const double* up, const double* down, std::int64_t hidden,
             std::int64_t width, std::optional<float> clamp, double scale, double* out) {
  std::vector<double> h;
  for (std::int64_t i = 0; i < width; ++i) {
    double g = dot(x, gate + i * hidden, hidden);
    double u = dot(x, up + i * hidden, hidden);
    if (clamp) {
      const double c = static_cast<double>(*clamp);
      g = std::fmin(g, c);
      u = std::fmax(std::fmin(u, c), -c);
    }
    h.push_back(g / (1 + std::exp(-g)) * u);
  }
  for (std::int64_t c = 0; c < hidden; ++c) out[c] += scale * dot(h.data(), down + c * width, width);
}

std::vector<double> plain_forward(const LayerShape& s, const PlainInputs& in) {
  std::vector<double> out(in.x.size(), 0.0);
  const std::int64_t half = s.intermediate * s.hidden;
  const std::int64_t tokens = static_cast<std::int64_t>(in.x.size()) / s.hidden;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* x = &in.x[t * s.hidden];
    double* y = &out[t * s.hidden];
    if (s.shared_intermediate > 0) {
      add_ffn(x, in.shared_gate.data(), in.shared_up.data(), in.shared_down.data(), s.hidden, s.shared_intermediate,
              s.shared_clamp, 1.0, y);
    }
    for (std::int64_t j = 0; j < s.topk; ++j) {
      const std::int64_t e = in.ids[t * s.topk + j];
      if (e < 0) continue;
      const double* gate = &in.gate_up[e * 2 * half];
      add_ffn(x, gate, gate + half, &in.down[e * half], s.hidden, s.intermediate, s.clamp,
              in.topk_weights[t * s.topk + j], y);
    }
  }
  return out;
}

// ---- Helpers
// -----------------------------------------------------------------------------------------------------------

LayerShape small_shape() {
  LayerShape shape;
  shape.hidden = 16;
  shape.intermediate = 8;
  shape.experts = 5;
  shape.topk = 3;
  return shape;
}

struct Case {
  LayerShape shape;
  HostWeights weights;
  HostBatch batch;

  ReferenceResult run(bool backward = true) const { return run_reference(shape, weights, batch, backward); }
};

Case random_case(const LayerShape& shape, const std::vector<std::int64_t>& tokens, std::uint64_t seed,
                 const std::string& routing = "uniform") {
  return {shape, random_weights(shape, seed), random_batch(shape, tokens, routing, seed + 1, true)};
}

void expect_near(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], tolerance) << "element " << i;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

std::vector<double> slice(const std::vector<double>& values, std::int64_t part, std::int64_t size) {
  return {values.begin() + part * size, values.begin() + (part + 1) * size};
}

bool all_zero(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return v == 0; });
}

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

/// d loss / d value by central differences, for each value of one input; the loss is <grad_output, output>.
std::vector<double> differences(const LayerShape& shape, PlainInputs in, std::vector<double> PlainInputs::*input,
                                const std::vector<double>& grad_output) {
  constexpr double kStep = 1e-5;
  const auto loss = [&] {
    const std::vector<double> out = plain_forward(shape, in);
    return dot(out.data(), grad_output.data(), static_cast<std::int64_t>(out.size()));
  };
  std::vector<double> result;
  for (double& value : in.*input) {
    const double before = value;
    value = before + kStep;
    const double above = loss();
    value = before - kStep;
    const double below = loss();
    value = before;
    result.push_back((above - below) / (2 * kStep));
  }
  return result;
}

void expect_gradients_are_differences(const Case& c) {
  const PlainInputs in(c.weights, c.batch);
  const std::vector<double> grad_output = widen(c.batch.grad_output);
  const ReferenceResult result = c.run();
  const auto check = [&](const char* name, const std::vector<double>& got, std::vector<double> PlainInputs::*input) {
    SCOPED_TRACE(name);
    std::vector<double> wanted = differences(c.shape, in, input, grad_output);
    expect_near(got, wanted, 1e-7);
  };
  expect_near(result.output, plain_forward(c.shape, in), 1e-12);
  check("grad_hidden_states", result.grad_hidden_states, &PlainInputs::x);
  check("grad_topk_weights", result.grad_topk_weights, &PlainInputs::topk_weights);
  check("grad_gate_up", result.grad_gate_up, &PlainInputs::gate_up);
  check("grad_down", result.grad_down, &PlainInputs::down);
  check("grad_shared_gate", result.grad_shared_gate, &PlainInputs::shared_gate);
  check("grad_shared_up", result.grad_shared_up, &PlainInputs::shared_up);
  check("grad_shared_down", result.grad_shared_down, &PlainInputs::shared_down);
}

/// H 8, I 8, one expert, one token, everything zero but what a test sets.
Case blank_case() {
  Case c;
  c.shape.hidden = c.shape.intermediate = 8;
  c.shape.experts = c.shape.topk = 1;
  c.weights.gate_up.resize(2 * 8 * 8);
  c.weights.down.resize(8 * 8);
  c.batch.tokens_per_rank = {1};
  c.batch.hidden_states.resize(8);
  c.batch.grad_output.resize(8);
  c.batch.topk_ids = {0};
  c.batch.topk_weights = {1.0f};
  return c;
}

/// One unit, g = gate, u = up, y[0] = down * h, seen with router weight 0.5 and dOut[0] = 1.
Case one_unit_case(float gate, float up, float down) {
  Case c = blank_case();
  c.batch.hidden_states[0] = to_bf16(1.0f);
  c.weights.gate_up[0] = to_bf16(gate);
  c.weights.gate_up[8 * 8] = to_bf16(up);
  c.weights.down[0] = to_bf16(down);
  c.batch.topk_weights[0] = 0.5f;
  c.batch.grad_output[0] = to_bf16(1.0f);
  return c;
}

// ---- Values
// ------------------------------------------------------------------------------------------------------------

TEST(ReferenceForward, OneUnitComputedByHand) {
  // sigmoid(1) = 0.7310585786300049; h = sigmoid(1) * 1 * 2; y = 4 h; out = 0.5 y.
  const ReferenceResult result = one_unit_case(1.0f, 2.0f, 4.0f).run();
  EXPECT_NEAR(result.output[0], 2.9242343145200196, 1e-15);
  EXPECT_TRUE(all_zero({result.output.begin() + 1, result.output.end()}));
}

TEST(ReferenceBackward, OneUnitComputedByHand) {
  // dh = 4; dw = 4 h; with w: du = 2 silu(1), dg = 2 * u * s (1 + (1 - s)) = 2 * 2 * 0.9276705118714869; dx = dg g' +
  // du u'.
  const ReferenceResult result = one_unit_case(1.0f, 2.0f, 4.0f).run();
  EXPECT_NEAR(result.grad_topk_weights[0], 5.848468629040039, 1e-14);
  EXPECT_NEAR(result.grad_gate_up[0], 3.7106820474859475, 1e-14);
  EXPECT_NEAR(result.grad_gate_up[64], 1.4621171572600098, 1e-14);
  EXPECT_NEAR(result.grad_down[0], 0.7310585786300049, 1e-15);
  EXPECT_NEAR(result.grad_hidden_states[0], 3.7106820474859475 * 1 + 1.4621171572600098 * 2, 1e-14);
}

TEST(ReferenceForward, RandomLayersEqualAPlainLoopOverTokens) {
  for (const std::int64_t topk : {1, 2, 5}) {
    LayerShape shape = small_shape();
    shape.topk = topk;
    shape.shared_intermediate = topk == 2 ? 24 : 0;
    const Case c = random_case(shape, {7, 0, 3}, 11);
    expect_near(c.run(false).output, plain_forward(shape, PlainInputs(c.weights, c.batch)), 1e-12);
  }
}

TEST(ReferenceForward, ClampBoundsGateFromAboveAndUpOnBothSides) {
  const double sigmoid2 = 1 / (1 + std::exp(-2.0));
  const auto output = [](float gate, float up) {
    Case c = one_unit_case(gate, up, 1.0f);
    c.shape.clamp = 2.0f;
    return c.run(false).output[0] / 0.5;
  };
  EXPECT_NEAR(output(3, 1), 2 * sigmoid2, 1e-15);
  EXPECT_NEAR(output(2, 5), 2 * sigmoid2 * 2, 1e-15);
  EXPECT_NEAR(output(2, -5), 2 * sigmoid2 * -2, 1e-15);
  EXPECT_NEAR(output(-5, 1), -5 / (1 + std::exp(5.0)), 1e-15);
  EXPECT_TRUE(std::isnan(output(std::numeric_limits<float>::quiet_NaN(), 1)));
  EXPECT_TRUE(std::isnan(output(1, std::numeric_limits<float>::quiet_NaN())));
}

TEST(ReferenceForward, SharedAndRoutedClampAreSeparate) {
  LayerShape shape = small_shape();
  shape.shared_intermediate = 16;
  shape.clamp = 0.25f;
  const Case routed = random_case(shape, {6}, 3);
  expect_near(routed.run(false).output, plain_forward(shape, PlainInputs(routed.weights, routed.batch)), 1e-12);
  shape.clamp.reset();
  shape.shared_clamp = 0.25f;
  const Case shared = random_case(shape, {6}, 3);
  expect_near(shared.run(false).output, plain_forward(shape, PlainInputs(shared.weights, shared.batch)), 1e-12);
}

TEST(ReferenceForward, EveryExpertChosenEqualsADenseMixture) {
  LayerShape shape = small_shape();
  shape.topk = shape.experts;
  const Case c = random_case(shape, {9}, 21);
  const PlainInputs in(c.weights, c.batch);
  std::vector<double> dense(in.x.size(), 0.0);
  for (std::int64_t t = 0; t < 9; ++t) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      double weight = 0;
      for (std::int64_t j = 0; j < shape.topk; ++j) {
        if (in.ids[t * shape.topk + j] == e) weight += in.topk_weights[t * shape.topk + j];
      }
      const double* gate = &in.gate_up[e * 2 * 8 * 16];
      add_ffn(&in.x[t * 16], gate, gate + 8 * 16, &in.down[e * 8 * 16], 16, 8, {}, weight, &dense[t * 16]);
    }
  }
  expect_near(c.run(false).output, dense, 1e-12);
}

TEST(ReferenceForward, EachTokenMeetsItsOwnExpert) {
  // All experts are one expert, but for the scale e + 1 of its output (exact in BF16).
  LayerShape shape = small_shape();
  shape.topk = 1;
  Case c = random_case(shape, {40}, 5);
  const std::int64_t half = shape.intermediate * shape.hidden;
  for (std::int64_t i = 0; i < half; ++i) {
    c.weights.down[i] = to_bf16(static_cast<float>(i % 7 - 3));
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      c.weights.gate_up[e * 2 * half + i] = c.weights.gate_up[i];
      c.weights.gate_up[e * 2 * half + half + i] = c.weights.gate_up[half + i];
      c.weights.down[e * half + i] = to_bf16(to_float(c.weights.down[i]) * static_cast<float>(e + 1));
    }
  }
  const std::vector<double> marked = c.run(false).output;
  const std::vector<std::int32_t> ids = c.batch.topk_ids;
  std::fill(c.batch.topk_ids.begin(), c.batch.topk_ids.end(), 0);
  const std::vector<double> plain = c.run(false).output;
  for (std::int64_t t = 0; t < 40; ++t) {
    for (std::int64_t i = 0; i < 16; ++i) {
      ASSERT_NEAR(marked[t * 16 + i], (ids[t] + 1) * plain[t * 16 + i], 1e-12) << "token " << t;
    }
  }
}

TEST(ReferenceForward, RoutedWeightsOfZeroLeaveTheSharedExpertAlone) {
  LayerShape shape = small_shape();
  shape.shared_intermediate = 24;
  Case c = random_case(shape, {5}, 8);
  std::fill(c.batch.topk_weights.begin(), c.batch.topk_weights.end(), 0.0f);
  const std::vector<double> weighted_zero = c.run(false).output;
  std::fill(c.batch.topk_ids.begin(), c.batch.topk_ids.end(), -1);
  expect_near(weighted_zero, c.run(false).output, 0.0);
}

// ---- Gradients
// ---------------------------------------------------------------------------------------------------------

TEST(ReferenceBackward, EveryGradientEqualsFiniteDifferences) {
  for (const std::uint64_t seed : {1, 2, 3})
    expect_gradients_are_differences(random_case(small_shape(), {4, 0, 2}, seed));
}

TEST(ReferenceBackward, EveryGradientEqualsFiniteDifferencesWithSharedExpert) {
  for (const std::int64_t shared : {8, 24}) {
    LayerShape shape = small_shape();
    shape.shared_intermediate = shared;
    expect_gradients_are_differences(random_case(shape, {5}, 4));
  }
}

TEST(ReferenceBackward, EveryGradientEqualsFiniteDifferencesUnderActiveClamps) {
  LayerShape shape = small_shape();
  shape.shared_intermediate = 8;
  shape.clamp = 0.5f;
  shape.shared_clamp = 0.75f;
  expect_gradients_are_differences(random_case(shape, {6}, 9));
}

TEST(ReferenceBackward, EveryGradientEqualsFiniteDifferencesWithRepeatedAndMaskedIds) {
  Case c = random_case(small_shape(), {6}, 10);
  c.batch.topk_ids = {3, 3, 1, -1, 2, 2, 4, 4, 4, -1, -1, -1, 0, -1, 0, 1, 2, 3};
  expect_gradients_are_differences(c);
}

TEST(ReferenceBackward, GradientPassesAtTheBoundOfTheClampAndStopsBeyond) {
  const auto gradients = [](float gate, float up) {
    Case c = one_unit_case(gate, up, 1.0f);
    c.shape.clamp = 2.0f;
    const ReferenceResult result = c.run();
    return std::pair(result.grad_gate_up[0], result.grad_gate_up[64]);
  };
  const auto at = gradients(2, 2);
  EXPECT_GT(at.first, 0);
  EXPECT_GT(at.second, 0);
  EXPECT_GT(gradients(2, -2).second, 0);
  const auto gate_beyond = gradients(2.015625f, 1);
  EXPECT_EQ(gate_beyond.first, 0);
  EXPECT_GT(gate_beyond.second, 0);
  EXPECT_EQ(gradients(1, 2.015625f).second, 0);
  EXPECT_EQ(gradients(1, -2.015625f).second, 0);
  EXPECT_NE(gradients(-8, 1).first, 0);  // the gate has no lower bound
}

TEST(ReferenceBackward, RouterGradientIsTheDotOfGradOutputAndTheExpertsOutput) {
  LayerShape shape = small_shape();
  for (const std::int64_t topk : {1, 4}) {
    shape.topk = topk;
    const Case c = random_case(shape, {6}, 13);
    const ReferenceResult result = c.run();
    for (std::int64_t i = 0; i < 6 * topk; ++i) {
      Case alone = c;
      std::fill(alone.batch.topk_weights.begin(), alone.batch.topk_weights.end(), 0.0f);
      alone.batch.topk_weights[i] = 1.0f;
      const std::vector<double> y = alone.run(false).output;
      const std::vector<double> grad = widen(c.batch.grad_output);
      EXPECT_NEAR(result.grad_topk_weights[i], dot(y.data(), grad.data(), 6 * 16), 1e-12);
    }
  }
}

TEST(ReferenceBackward, RouterGradientOfAZeroWeightIsThereAndFinite) {
  Case c = one_unit_case(1.0f, 2.0f, 4.0f);
  c.batch.topk_weights[0] = 0.0f;
  EXPECT_NEAR(c.run().grad_topk_weights[0], 5.848468629040039, 1e-14);
}

TEST(ReferenceBackward, RepeatedIdsCountOncePerSlot) {
  LayerShape shape = small_shape();
  shape.topk = 4;
  Case c = random_case(shape, {3}, 17);
  c.batch.topk_ids = {3, 3, 1, 1, 3, 3, 1, 1, 3, 3, 1, 1};
  Case merged = c;
  for (std::int64_t t = 0; t < 3; ++t) {
    float* weights = &merged.batch.topk_weights[t * 4];
    // Halves add exactly: the merged weight is the sum of both slots'.
    c.batch.topk_weights[t * 4] = c.batch.topk_weights[t * 4 + 1] = weights[0];
    c.batch.topk_weights[t * 4 + 2] = c.batch.topk_weights[t * 4 + 3] = weights[2];
    weights[0] *= 2;
    weights[2] *= 2;
    merged.batch.topk_ids[t * 4 + 1] = merged.batch.topk_ids[t * 4 + 3] = -1;
  }
  const ReferenceResult twice = c.run();
  const ReferenceResult once = merged.run();
  expect_near(twice.output, once.output, 1e-12);
  expect_near(twice.grad_hidden_states, once.grad_hidden_states, 1e-12);
  expect_near(twice.grad_gate_up, once.grad_gate_up, 1e-12);
  expect_near(twice.grad_down, once.grad_down, 1e-12);
  for (std::int64_t i = 0; i < 12; i += 2) {
    EXPECT_EQ(twice.grad_topk_weights[i], twice.grad_topk_weights[i + 1]);
    EXPECT_NEAR(twice.grad_topk_weights[i], once.grad_topk_weights[i], 1e-12);
  }
}

TEST(ReferenceBackward, MoreRowsThanOneChunkAddUp) {
  LayerShape shape = small_shape();
  shape.topk = 2;
  shape.shared_intermediate = 8;
  const Case whole = random_case(shape, {700, 2000}, 19, "single:2");
  const ReferenceResult result = whole.run();
  expect_near(result.output, plain_forward(shape, PlainInputs(whole.weights, whole.batch)), 1e-12);

  std::vector<double> grad_down(result.grad_down.size(), 0.0);
  std::vector<double> grad_shared_up(result.grad_shared_up.size(), 0.0);
  std::vector<double> grad_hidden_states;
  for (std::int64_t first = 0; first < 2700; first += 300) {
    Case part = whole;
    const auto cut = [&](auto& values, std::int64_t width) {
      values = {values.begin() + first * width, values.begin() + (first + 300) * width};
    };
    part.batch.tokens_per_rank = {300};
    cut(part.batch.hidden_states, 16);
    cut(part.batch.grad_output, 16);
    cut(part.batch.topk_ids, 2);
    cut(part.batch.topk_weights, 2);
    const ReferenceResult partial = part.run();
    for (std::size_t i = 0; i < grad_down.size(); ++i) grad_down[i] += partial.grad_down[i];
    for (std::size_t i = 0; i < grad_shared_up.size(); ++i) grad_shared_up[i] += partial.grad_shared_up[i];
    grad_hidden_states.insert(grad_hidden_states.end(), partial.grad_hidden_states.begin(),
                              partial.grad_hidden_states.end());
  }
  expect_near(result.grad_down, grad_down, 1e-9);
  expect_near(result.grad_shared_up, grad_shared_up, 1e-9);
  expect_near(result.grad_hidden_states, grad_hidden_states, 1e-12);
}

// ---- Nothing where nothing belongs
// -------------------------------------------------------------------------------------

TEST(ReferenceZeros, ExpertsWithoutRowsHaveExactlyZeroGradients) {
  LayerShape shape = small_shape();
  shape.experts = 6;
  shape.topk = 1;
  Case c = random_case(shape, {32}, 23);
  for (std::int64_t t = 0; t < 32; ++t) c.batch.topk_ids[t] = t < 8 ? 1 : t < 16 ? 2 : 4;
  const ReferenceResult result = c.run();
  for (std::int64_t e = 0; e < 6; ++e) {
    const bool used = e == 1 || e == 2 || e == 4;
    EXPECT_EQ(all_zero(slice(result.grad_gate_up, e, 2 * 8 * 16)), !used) << "expert " << e;
    EXPECT_EQ(all_zero(slice(result.grad_down, e, 8 * 16)), !used) << "expert " << e;
  }
}

TEST(ReferenceZeros, MaskedRoutesContributeNothingAndHaveZeroRouterGradient) {
  Case c = random_case(small_shape(), {4}, 29);
  c.batch.topk_ids = {-1, 2, -1, -1, -1, -1, 0, -1, 1, 3, 4, 0};
  for (std::size_t i = 0; i < c.batch.topk_ids.size(); ++i) {
    if (c.batch.topk_ids[i] < 0) c.batch.topk_weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  const ReferenceResult result = c.run();
  EXPECT_TRUE(all_zero(slice(result.output, 1, 16)));
  EXPECT_TRUE(all_zero(slice(result.grad_hidden_states, 1, 16)));
  EXPECT_TRUE(all_finite(result.output));
  for (std::size_t i = 0; i < c.batch.topk_ids.size(); ++i) {
    EXPECT_EQ(result.grad_topk_weights[i] == 0, c.batch.topk_ids[i] < 0) << "slot " << i;
  }
}

TEST(ReferenceZeros, NoTokensAtAllGiveEmptyOutputsAndZeroGradients) {
  LayerShape shape = small_shape();
  shape.shared_intermediate = 8;
  const ReferenceResult result = random_case(shape, {0, 0}, 31).run();
  EXPECT_TRUE(result.output.empty());
  EXPECT_TRUE(result.grad_hidden_states.empty());
  EXPECT_TRUE(result.grad_topk_weights.empty());
  EXPECT_EQ(result.grad_gate_up.size(), 5u * 2 * 8 * 16);
  EXPECT_EQ(result.grad_shared_down.size(), 16u * 8);
  EXPECT_TRUE(all_zero(result.grad_gate_up) && all_zero(result.grad_down) && all_zero(result.grad_shared_gate) &&
              all_zero(result.grad_shared_up) && all_zero(result.grad_shared_down));
}

TEST(ReferenceZeros, ForwardAloneLeavesGradientsEmptyAndNeedsNoGradOutput) {
  Case c = random_case(small_shape(), {4}, 37);
  const std::vector<double> output = c.run(true).output;
  c.batch.grad_output.clear();
  const ReferenceResult result = c.run(false);
  EXPECT_TRUE(same_bits(result.output, output));
  EXPECT_TRUE(result.grad_hidden_states.empty() && result.grad_topk_weights.empty() && result.grad_gate_up.empty() &&
              result.grad_down.empty() && result.grad_shared_gate.empty());
}

// ---- NaN and Inf stay where they are
// -----------------------------------------------------------------------------------

/// Expects tokens other than `token`, and weight gradients of experts that it does not use, to keep their bits.
void expect_contained(const Case& clean, const Case& dirty, std::int64_t token) {
  const ReferenceResult want = clean.run();
  const ReferenceResult got = dirty.run();
  const LayerShape& s = clean.shape;
  for (std::int64_t t = 0; t < clean.batch.tokens(); ++t) {
    if (t == token) continue;
    EXPECT_TRUE(same_bits(slice(got.output, t, s.hidden), slice(want.output, t, s.hidden))) << "token " << t;
    EXPECT_TRUE(same_bits(slice(got.grad_hidden_states, t, s.hidden), slice(want.grad_hidden_states, t, s.hidden)));
    EXPECT_TRUE(same_bits(slice(got.grad_topk_weights, t, s.topk), slice(want.grad_topk_weights, t, s.topk)));
  }
  for (std::int64_t e = 0; e < s.experts; ++e) {
    const std::int32_t* ids = &clean.batch.topk_ids[token * s.topk];
    const bool touched = std::find(ids, ids + s.topk, e) != ids + s.topk;
    const std::int64_t half = s.intermediate * s.hidden;
    EXPECT_EQ(same_bits(slice(got.grad_gate_up, e, 2 * half), slice(want.grad_gate_up, e, 2 * half)), !touched);
    EXPECT_EQ(all_finite(slice(got.grad_gate_up, e, 2 * half)), !touched);
    EXPECT_EQ(all_finite(slice(got.grad_down, e, half)), !touched);
  }
}

TEST(ReferenceNonFinite, AValueInATokenReachesOnlyItsResultsAndTheGradientsItTouches) {
  LayerShape shape = small_shape();
  shape.experts = 8;
  shape.topk = 2;
  const Case clean = random_case(shape, {70, 60}, 41);
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const std::int64_t token : {0, 66, 129}) {
      Case dirty = clean;
      dirty.batch.hidden_states[token * 16 + 3] = to_bf16(value);
      expect_contained(clean, dirty, token);
    }
  }
}

TEST(ReferenceNonFinite, AValueInGradOutputLeavesTheOutputAlone) {
  Case dirty = random_case(small_shape(), {20}, 43);
  const std::vector<double> output = dirty.run().output;
  dirty.batch.grad_output[5 * 16] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  const ReferenceResult result = dirty.run();
  EXPECT_TRUE(same_bits(result.output, output));
  EXPECT_FALSE(all_finite(slice(result.grad_hidden_states, 5, 16)));
  EXPECT_TRUE(all_finite(slice(result.grad_hidden_states, 4, 16)));
  EXPECT_TRUE(all_finite(slice(result.grad_hidden_states, 6, 16)));
}

TEST(ReferenceNonFinite, AFullyMaskedTokenTouchesNothing) {
  Case c = random_case(small_shape(), {20}, 47);
  std::fill_n(&c.batch.topk_ids[7 * 3], 3, -1);
  const ReferenceResult want = c.run();
  std::fill_n(&c.batch.hidden_states[7 * 16], 16, to_bf16(static_cast<float>(kNan)));
  const ReferenceResult got = c.run();
  EXPECT_TRUE(same_bits(got.output, want.output));
  EXPECT_TRUE(same_bits(got.grad_hidden_states, want.grad_hidden_states));
  EXPECT_TRUE(same_bits(got.grad_gate_up, want.grad_gate_up));
  EXPECT_TRUE(same_bits(got.grad_down, want.grad_down));
}

TEST(ReferenceNonFinite, AnExpertWithoutRowsMayHoldAnything) {
  Case c = random_case(small_shape(), {20}, 53);
  for (std::int32_t& id : c.batch.topk_ids) id = id == 2 ? 1 : id;
  const ReferenceResult want = c.run();
  std::fill_n(&c.weights.gate_up[2 * 2 * 8 * 16], 2 * 8 * 16, to_bf16(static_cast<float>(kNan)));
  std::fill_n(&c.weights.down[2 * 8 * 16], 8 * 16, to_bf16(static_cast<float>(kNan)));
  const ReferenceResult got = c.run();
  EXPECT_TRUE(same_bits(got.output, want.output));
  EXPECT_TRUE(same_bits(got.grad_gate_up, want.grad_gate_up));
  EXPECT_TRUE(same_bits(got.grad_hidden_states, want.grad_hidden_states));
}

// ---- Determinism, progress, refusal
// ------------------------------------------------------------------------------------

TEST(ReferenceDeterminism, RepeatsAndOtherSplitsOverRanksHaveTheSameBits) {
  LayerShape shape = small_shape();
  shape.shared_intermediate = 16;
  Case c = random_case(shape, {900, 300}, 59, "zipf:1.5");
  const ReferenceResult first = c.run();
  for (const std::vector<std::int64_t>& split : {std::vector<std::int64_t>{900, 300}, {0, 1200}, {1, 2, 1197, 0}}) {
    c.batch.tokens_per_rank = split;
    const ReferenceResult again = c.run();
    EXPECT_TRUE(same_bits(again.output, first.output));
    EXPECT_TRUE(same_bits(again.grad_hidden_states, first.grad_hidden_states));
    EXPECT_TRUE(same_bits(again.grad_topk_weights, first.grad_topk_weights));
    EXPECT_TRUE(same_bits(again.grad_gate_up, first.grad_gate_up));
    EXPECT_TRUE(same_bits(again.grad_down, first.grad_down));
    EXPECT_TRUE(same_bits(again.grad_shared_down, first.grad_shared_down));
  }
}

TEST(ReferenceProgress, RisesToOne) {
  for (const std::int64_t tokens : {0, 50, 3000}) {
    const Case c = random_case(small_shape(), {tokens}, 61);
    std::vector<double> shares;
    const auto note = [](double share, void* user) { static_cast<std::vector<double>*>(user)->push_back(share); };
    run_reference(c.shape, c.weights, c.batch, true, note, &shares);
    ASSERT_FALSE(shares.empty());
    EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
    EXPECT_GE(shares.front(), 0);
    EXPECT_EQ(shares.back(), 1.0);
  }
}

TEST(ReferenceRefusal, InputsThatDoNotFitAreRefusedBeforeAnyWork) {
  const Case good = random_case(small_shape(), {4}, 67);
  Case c = good;
  c.weights.down.pop_back();
  EXPECT_THROW(c.run(), InputError);
  c = good;
  c.batch.topk_ids[2] = 5;
  EXPECT_THROW(c.run(), InputError);
  c = good;
  c.batch.grad_output.clear();
  EXPECT_THROW(c.run(), InputError);
  c = good;
  c.shape.hidden = 12;
  EXPECT_THROW(c.run(), InputError);
}

}  // namespace
}  // namespace moewave
