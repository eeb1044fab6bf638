// Promises about the clamp: which side of the bound counts, also where BF16 cannot tell the sides apart.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

constexpr std::size_t kSize = 8;

// One unit of a routed or a shared expert with FP32 pre-activations gate and up that need more bits than BF16 has:
// x = (1, 2^-8, 2^-16), so that each of their values is a sum of three weights.
struct OneUnit {
  LayerCase c;
  bool shared;

  OneUnit(float gate, float up, float bound, bool is_shared) : shared(is_shared) {
    c.shape = make_shape(kSize, kSize, 1, 1, kSize);
    (shared ? c.shape.shared_clamp : c.shape.clamp) = bound;
    const std::size_t matrix = kSize * kSize;
    for (std::vector<Bf16>* weights :
         {&c.weights.down, &c.weights.shared_gate, &c.weights.shared_up, &c.weights.shared_down}) {
      weights->resize(matrix);
    }
    c.weights.gate_up.resize(2 * matrix);
    Bf16* gate_row = shared ? c.weights.shared_gate.data() : c.weights.gate_up.data();
    Bf16* up_row = shared ? c.weights.shared_up.data() : c.weights.gate_up.data() + matrix;
    spread(gate, gate_row);
    spread(up, up_row);
    (shared ? c.weights.shared_down : c.weights.down)[0] = to_bf16(1.0f);
    c.batch.tokens_per_rank = {1};
    c.batch.hidden_states.resize(kSize);
    c.batch.grad_output.resize(kSize);
    c.batch.hidden_states[0] = to_bf16(1.0f);
    c.batch.hidden_states[1] = to_bf16(1.0f / 256);
    c.batch.hidden_states[2] = to_bf16(1.0f / 65536);
    c.batch.grad_output[0] = to_bf16(1.0f);
    c.batch.topk_ids = {0};
    c.batch.topk_weights = {1.0f};
  }

  // Weights w with w[0] + w[1] / 2^8 + w[2] / 2^16 == value, exactly.
  static void spread(float value, Bf16* weights) {
    float rest = value;
    float scale = 1.0f;
    for (int i = 0; i < 3; ++i, scale *= 256) {
      weights[i] = to_bf16(rest * scale);
      rest -= to_float(weights[i]) / scale;
    }
    EXPECT_EQ(rest, 0.0f) << value << " needs more bits than the test can spread";
  }

  float gate_gradient(const Results& r) const {
    return shared ? r.gradients.shared_gate.f32[0] : r.gradients.gate_up.f32[0];
  }
  float up_gradient(const Results& r) const {
    return shared ? r.gradients.shared_up.f32[0] : r.gradients.gate_up.f32[kSize * kSize];
  }
};

// Bounds that BF16 holds, and bounds between two BF16 numbers, below and above the middle.
const float kBounds[] = {1.0f, 1.0f + 1.0f / 1024, 1.0f + 1.0f / 128 - 1.0f / 1024, 1.0f + 1.0f / 256};
const float kDistances[] = {0.0f,        1.0f / 32768, -1.0f / 32768, 1.0f / 2048, -1.0f / 2048, 1.0f / 512,
                            -1.0f / 512, 0.0078125f,   -0.0078125f,   0.5f,        -0.5f};

// The gradient of a clamped side is zero exactly where the FP32 value lies beyond the bound.
TEST(EmulatorClamp, GradientStopsExactlyBeyondTheBoundOnBothSidesOfARounding) {
  for (const bool shared : {false, true}) {
    for (const std::int64_t saved_rows : {-1, 0}) {
      LayerSetup setup;
      setup.options.saved_rows = saved_rows;
      for (const float bound : kBounds) {
        for (const float distance : kDistances) {
          const float value = bound + distance;
          SCOPED_TRACE(testing::Message() << "bound " << bound << " value " << value << " shared " << shared);
          const bool beyond = value > bound;
          const OneUnit gate(value, 0.5f, bound, shared);
          EXPECT_EQ(gate.gate_gradient(run_case(gate.c, setup)) == 0.0f, beyond);
          for (const float sign : {1.0f, -1.0f}) {
            const OneUnit up(0.5f, sign * value, bound, shared);
            EXPECT_EQ(up.up_gradient(run_case(up.c, setup)) == 0.0f, beyond);
          }
          // Gate has no lower bound.
          const OneUnit low(-value, 0.5f, bound, shared);
          EXPECT_NE(low.gate_gradient(run_case(low.c, setup)), 0.0f);
        }
      }
    }
  }
}

TEST(EmulatorClamp, OutputIsThatOfTheBoundWhereverTheClampActs) {
  for (const bool shared : {false, true}) {
    for (const float bound : {1.0f, 1.0f + 1.0f / 1024}) {
      const Results at_bound = run_case(OneUnit(64.0f, 64.0f, bound, shared).c);
      for (const float value : {1.5f, 2.0f, 1000.0f}) {
        expect_same_bits("output", run_case(OneUnit(value, value, bound, shared).c).output, at_bound.output);
      }
      EXPECT_NEAR(static_cast<double>(to_float(at_bound.output[0])),
                  static_cast<double>(bound * bound) / (1 + std::exp(-static_cast<double>(bound))), 4e-3);
    }
  }
}

// Clamps that act on about a third of the values, separately for routed and shared experts.
TEST(EmulatorClamp, RandomLayersMatchTheReference) {
  LayerCase c = marked_case(make_shape(64, 136, 6, 2, 72), {60, 80}, 90);
  for (const auto& [clamp, shared_clamp] : std::vector<std::pair<std::optional<float>, std::optional<float>>>{
           {0.4f, {}}, {{}, 0.4f}, {0.3f, 1.1f}, {1e-3f, 1e3f}}) {
    c.shape.clamp = clamp;
    c.shape.shared_clamp = shared_clamp;
    expect_two_steps_match(c);
    expect_two_steps_match(c, tiny_ring());
  }
}

TEST(EmulatorClamp, ABoundThatNothingReachesChangesNoBit) {
  LayerCase c = marked_case(make_shape(64, 48, 6, 2, 40), {60, 80}, 91);
  const Results wanted = run_case(c);
  c.shape.clamp = c.shape.shared_clamp = 1e30f;
  expect_same_results(run_case(c), wanted);
}

TEST(EmulatorClamp, NanPassesThrough) {
  LayerCase c = random_case(make_shape(16, 8, 2, 1), {4}, 92);
  c.shape.clamp = 0.5f;
  c.batch.hidden_states[16] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  const Results results = run_case(c);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(to_float(results.output[i])), i / 16 == 1) << i;
}

}  // namespace
}  // namespace moewave::test
