// Promises about NaN and infinity: they spread to the results of their token and to the weight gradients that it
// touches, and to nothing else, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "support/emulated.h"

namespace moewave::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kVictim = 41;  // of rank 1

LayerCase clean_case() {
  LayerCase c = random_case(make_shape(32, 16, 8, 2, 24), {40, 50}, 110);
  route_within(c, 0, 7);
  // The victim alone shares no tile with nobody: its experts 2 and 5 have other rows too.
  c.batch.topk_ids[kVictim * 2] = 2;
  c.batch.topk_ids[kVictim * 2 + 1] = 5;
  return c;
}

bool is_touched_expert(std::int64_t expert) { return expert == 2 || expert == 5; }

enum class Part { kUntouched, kTouched };

// Compares row after row: rows of `touched` must hold a NaN each if `spreads`, all others keep their bits.
template <typename T>
void expect_spread(const std::string& name, const std::vector<T>& got, const std::vector<T>& clean, std::int64_t width,
                   const std::function<bool(std::int64_t)>& touched, bool spreads = true) {
  ASSERT_EQ(got.size(), clean.size()) << name;
  bool any_nan = false;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(got.size()) / width; ++row) {
    if (!touched(row)) {
      expect_same_bits(name + " row " + std::to_string(row), row_of(got, row, width), row_of(clean, row, width));
      continue;
    }
    for (const double value : widen(row_of(got, row, width))) any_nan |= !std::isfinite(value);
  }
  EXPECT_EQ(any_nan, spreads) << name;
}

struct Spread {
  bool output = true;
  bool token_gradients = true;
  bool router_gradient = true;
  bool gate_up_gradients = true;
  bool down_gradients = true;
  bool shared_gate_up_gradients = true;
  bool shared_down_gradients = true;
};

void expect_only_victim(const std::function<void(LayerCase&)>& poison, const Spread& spread) {
  for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
    for (const std::int64_t saved_rows : {-1, 0}) {
      setup.options.saved_rows = saved_rows;
      LayerCase c = clean_case();
      EmulatedLayer layer = make_layer(c, setup);
      const Results clean = run_step(layer, c);
      poison(c);
      const Results results = run_step(layer, c);
      const auto victim = [](std::int64_t row) { return row == kVictim; };
      const auto all = [](std::int64_t) { return true; };
      expect_spread("output", results.output, clean.output, 32, victim, spread.output);
      expect_spread("grad_hidden_states", results.gradients.hidden_states, clean.gradients.hidden_states, 32, victim,
                    spread.token_gradients);
      expect_spread("grad_topk_weights", results.gradients.topk_weights, clean.gradients.topk_weights, 2, victim,
                    spread.router_gradient);
      expect_spread("grad_gate_up", results.gradients.gate_up.f32, clean.gradients.gate_up.f32, 2 * 32 * 16,
                    is_touched_expert, spread.gate_up_gradients);
      expect_spread("grad_down", results.gradients.down.f32, clean.gradients.down.f32, 32 * 16, is_touched_expert,
                    spread.down_gradients);
      expect_spread("grad_shared_gate", results.gradients.shared_gate.f32, clean.gradients.shared_gate.f32, 32, all,
                    spread.shared_gate_up_gradients);
      expect_spread("grad_shared_down", results.gradients.shared_down.f32, clean.gradients.shared_down.f32, 24, all,
                    spread.shared_down_gradients);
      // No lasting effect on the next clean call.
      expect_same_results(run_step(layer, clean_case()), clean);
    }
  }
}

TEST(EmulatorNonFinite, ANanInATokenStaysWithItsToken) {
  expect_only_victim([](LayerCase& c) { c.batch.hidden_states[kVictim * 32 + 7] = to_bf16(kNan); }, {});
}

TEST(EmulatorNonFinite, AnInfinityInATokenStaysWithItsToken) {
  expect_only_victim(
      [](LayerCase& c) { c.batch.hidden_states[kVictim * 32 + 7] = to_bf16(std::numeric_limits<float>::infinity()); },
      {});
}

TEST(EmulatorNonFinite, ANanInAnOutputGradientLeavesOutputsAlone) {
  Spread spread;
  spread.output = false;
  expect_only_victim([](LayerCase& c) { c.batch.grad_output[kVictim * 32 + 3] = to_bf16(kNan); }, spread);
}

TEST(EmulatorNonFinite, ANanInARouterWeightLeavesRouterGradientsAndTheSharedExpertAlone) {
  Spread spread;
  spread.router_gradient = spread.shared_gate_up_gradients = spread.shared_down_gradients = false;
  expect_only_victim([](LayerCase& c) { c.batch.topk_weights[kVictim * 2] = kNan; }, spread);
}

TEST(EmulatorNonFinite, AMaskedTokenTouchesNoRoutedExpert) {
  LayerCase c = clean_case();
  c.batch.topk_ids[kVictim * 2] = c.batch.topk_ids[kVictim * 2 + 1] = -1;
  const Results clean = run_case(c);
  c.batch.hidden_states[kVictim * 32] = to_bf16(kNan);
  c.batch.grad_output[kVictim * 32] = to_bf16(kNan);
  const Results results = run_case(c);
  expect_same_buffer("grad_gate_up", results.gradients.gate_up, clean.gradients.gate_up);
  expect_same_buffer("grad_down", results.gradients.down, clean.gradients.down);
  expect_same_bits("grad_topk_weights", results.gradients.topk_weights, clean.gradients.topk_weights);
  expect_spread("output", results.output, clean.output, 32, [](std::int64_t row) { return row == kVictim; });
}

TEST(EmulatorNonFinite, AnExpertWithNanWeightsHarmsOnlyTokensThatItSees) {
  LayerCase c = clean_case();
  const Results clean = run_case(c);
  for (std::int64_t i = 0; i < 32 * 16; ++i) c.weights.down[static_cast<std::size_t>(4 * 32 * 16 + i)] = to_bf16(kNan);
  const Results results = run_case(c);
  const auto sees = [&](std::int64_t token) {
    const std::size_t at = static_cast<std::size_t>(token * 2);
    return c.batch.topk_ids[at] == 4 || c.batch.topk_ids[at + 1] == 4;
  };
  expect_spread("output", results.output, clean.output, 32, sees);
  expect_spread("grad_hidden_states", results.gradients.hidden_states, clean.gradients.hidden_states, 32, sees);
  expect_spread("grad_gate_up", results.gradients.gate_up.f32, clean.gradients.gate_up.f32, 2 * 32 * 16,
                [](std::int64_t expert) { return expert == 4; });
  // The down gradient of expert 4 needs h, not the weights.
  expect_same_buffer("grad_down", results.gradients.down, clean.gradients.down);
}

TEST(EmulatorNonFinite, AnExpertWithoutRowsMayHoldAnything) {
  LayerCase c = clean_case();
  const Results clean = run_case(c);
  for (std::int64_t i = 0; i < 2 * 32 * 16; ++i)
    c.weights.gate_up[static_cast<std::size_t>(7 * 2 * 32 * 16 + i)] = to_bf16(kNan);
  for (std::int64_t i = 0; i < 32 * 16; ++i) c.weights.down[static_cast<std::size_t>(7 * 32 * 16 + i)] = to_bf16(kNan);
  expect_same_results(run_case(c), clean);
}

}  // namespace
}  // namespace moewave::test
