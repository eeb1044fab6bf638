// Promises about gradients: of the router, of the weights in every form of delivery, and from every kind of context.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

// Output of one expert for every token: f_e(x), from a layer that routes everything there with weight 1.
std::vector<double> output_of_expert(const LayerCase& c, std::int64_t expert) {
  LayerCase alone = c;
  alone.shape.topk = 1;
  alone.shape.shared_intermediate = 0;
  alone.weights.shared_gate.clear();
  alone.weights.shared_up.clear();
  alone.weights.shared_down.clear();
  const std::size_t tokens = static_cast<std::size_t>(c.batch.tokens());
  alone.batch.topk_ids.assign(tokens, static_cast<std::int32_t>(expert));
  alone.batch.topk_weights.assign(tokens, 1.0f);
  return run_reference(alone.shape, alone.weights, alone.batch, false).output;
}

// <dy, f_e(x)> for each route, without any derivative.
std::vector<double> router_gradients(const LayerCase& c) {
  std::vector<std::vector<double>> outputs;
  for (std::int64_t expert = 0; expert < c.shape.experts; ++expert) outputs.push_back(output_of_expert(c, expert));
  const std::vector<double> dy = widen(c.batch.grad_output);
  std::vector<double> result;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(c.batch.topk_ids.size()); ++i) {
    const std::vector<double>& output =
        outputs[static_cast<std::size_t>(c.batch.topk_ids[static_cast<std::size_t>(i)])];
    const std::int64_t row = i / c.shape.topk * c.shape.hidden;
    double sum = 0;
    for (std::int64_t h = row; h < row + c.shape.hidden; ++h)
      sum += dy[static_cast<std::size_t>(h)] * output[static_cast<std::size_t>(h)];
    result.push_back(sum);
  }
  return result;
}

// B89, and B101: routing that differs between the ranks.
TEST(EmulatorRouterGradient, IsTheProductOfOutputGradientAndTheExpertsOutput) {
  for (const std::int64_t topk : {1, 4}) {
    const LayerCase c = marked_case(make_shape(64, 264, 6, topk), {33, 20}, 70, "zipf:1");
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
      const Results results = expect_two_steps_match(c, setup);
      expect_close("grad_topk_weights", widen(results.gradients.topk_weights), router_gradients(c), topk, 1e-2);
    }
  }
}

// B91: every route of a token lies on another rank.
TEST(EmulatorRouterGradient, IsWholeWhenATokensExpertsLieOnAllRanks) {
  LayerCase c = marked_case(make_shape(64, 48, 4, 4), {10, 20, 0, 7}, 71);
  route(c, [](std::int64_t token, std::int64_t slot) { return (token + slot) % 4; });
  const Results results = expect_two_steps_match(c);
  expect_close("grad_topk_weights", widen(results.gradients.topk_weights), router_gradients(c), 4, 1e-2);
}

// dw is never divided by w: it does not depend on w at all, and is there for a weight of zero.
TEST(EmulatorRouterGradient, HasTheSameBitsWhateverTheWeight) {
  LayerCase c = marked_case(make_shape(64, 48, 5, 3), {30, 21}, 72);
  const Results wanted = run_case(c);
  for (const float weight : {0.0f, 1e-30f, -2.0f, 1e30f}) {
    c.batch.topk_weights.assign(c.batch.topk_weights.size(), weight);
    expect_same_bits("grad_topk_weights", run_case(c).gradients.topk_weights, wanted.gradients.topk_weights);
  }
}

// ---- Delivery of weight gradients

// One unit with g = 32 (whose sigmoid is 1 in FP32), u = 1, dh = 1 and everything exact: a token of `scale` 1 gives
// gradients of exactly 1 in the elements that expect_sum looks at, a token of `scale` s gives s.
struct OneUnit {
  static constexpr std::int64_t kSize = 8;
  LayerCase c;

  explicit OneUnit(const Tokens& tokens) {
    c.shape = make_shape(kSize, kSize, 2, 1, kSize);
    const std::size_t matrix = kSize * kSize;
    std::vector<Bf16> gate(matrix), up(matrix), down(matrix);
    gate[0] = to_bf16(32.0f);
    up[0] = to_bf16(1.0f);
    down[0] = to_bf16(1.0f);
    c.weights.gate_up.resize(2 * 2 * matrix);
    c.weights.down.resize(2 * matrix);
    for (std::size_t expert = 0; expert < 2; ++expert) {
      std::copy(gate.begin(), gate.end(), c.weights.gate_up.begin() + static_cast<std::ptrdiff_t>(2 * expert * matrix));
      std::copy(up.begin(), up.end(),
                c.weights.gate_up.begin() + static_cast<std::ptrdiff_t>((2 * expert + 1) * matrix));
      std::copy(down.begin(), down.end(), c.weights.down.begin() + static_cast<std::ptrdiff_t>(expert * matrix));
    }
    c.weights.shared_gate = gate;
    c.weights.shared_up = up;
    c.weights.shared_down = down;
    c.batch.tokens_per_rank = tokens;
    const std::size_t count = static_cast<std::size_t>(c.batch.tokens());
    c.batch.hidden_states.resize(count * kSize);
    c.batch.grad_output.resize(count * kSize);
    c.batch.topk_ids.assign(count, 1);
    c.batch.topk_weights.assign(count, 1.0f);
    for (std::size_t token = 0; token < count; ++token) {
      c.batch.hidden_states[token * kSize] = to_bf16(1.0f);
      c.batch.hidden_states[token * kSize + 1] = to_bf16(1.0f / 32);
    }
  }

  void scale(std::size_t token, float value) {
    c.batch.grad_output[token * kSize] = to_bf16(value);
    c.batch.grad_output[token * kSize + 1] = to_bf16(value / 32);
  }

  static void expect_sum(const HostGradients& gradients, float wanted) {
    const std::size_t matrix = kSize * kSize;
    EXPECT_EQ(gradients.gate_up.f32[2 * matrix], wanted);      // dG x[0]: expert 1, gate row 0, column 0
    EXPECT_EQ(gradients.gate_up.f32[3 * matrix + 1], wanted);  // dU x[1]: 32 / 32
    EXPECT_EQ(gradients.down.f32[matrix + kSize], wanted);     // dOut[1] h: 1 / 32 * 32
    EXPECT_EQ(gradients.shared_gate.f32[0], wanted);
    EXPECT_EQ(gradients.shared_up.f32[1], wanted);
    EXPECT_EQ(gradients.shared_down.f32[kSize], wanted);
  }
};

// B97: 257 would mean that the gradient went through BF16, 256 that it was added in BF16.
TEST(EmulatorWeightGradients, AddingToAnFp32BufferNeverPassesThroughBf16) {
  for (const Tokens& tokens : {Tokens{2}, Tokens{1, 1}, Tokens{0, 2}, Tokens{0, 1, 1}}) {
    OneUnit unit(tokens);
    unit.scale(0, 1.0f);
    unit.scale(1, 1.0f / 1024);
    Results results(unit.c);
    HostGradients& gradients = results.gradients;
    gradients.accumulate = true;
    for (GradBuffer* buffer :
         {&gradients.gate_up, &gradients.down, &gradients.shared_gate, &gradients.shared_up, &gradients.shared_down}) {
      buffer->f32.assign(buffer->f32.size(), 256.0f);
    }
    EmulatedLayer layer = make_layer(unit.c);
    run_step(layer, unit.c, results);
    OneUnit::expect_sum(gradients, 257.0009765625f);
  }
}

// The sum that a macrobatch leaves for the next is FP32, and added to the buffer once: 2^24 + 1 would be lost.
TEST(EmulatorWeightGradients, SumsCarriedOverMacrobatchesAreAddedOnce) {
  OneUnit unit({400, 400});
  for (std::size_t token = 0; token < 800; ++token) unit.scale(token, token % 200 == 3 ? 1.0f : 0.0f);
  Results results(unit.c);
  HostGradients& gradients = results.gradients;
  gradients.accumulate = true;
  for (GradBuffer* buffer : {&gradients.gate_up, &gradients.down}) buffer->f32.assign(buffer->f32.size(), 16777216.0f);
  for (GradBuffer* buffer : {&gradients.shared_gate, &gradients.shared_up, &gradients.shared_down}) {
    buffer->f32.assign(buffer->f32.size(), 16777216.0f);
  }
  EmulatedLayer layer = make_layer(unit.c, tiny_ring());
  run_step(layer, unit.c, results);
  ASSERT_GT(results.backward_report.ranks[1].macrobatches, 4);
  OneUnit::expect_sum(gradients, 16777220.0f);
}

std::vector<Bf16> rounded(const std::vector<float>& values) {
  std::vector<Bf16> result;
  for (const float value : values) result.push_back(to_bf16(value));
  return result;
}

using Buffer = GradBuffer HostGradients::*;
constexpr Buffer kBuffers[] = {&HostGradients::gate_up, &HostGradients::down, &HostGradients::shared_gate,
                               &HostGradients::shared_up, &HostGradients::shared_down};

// Every form of delivery makes the same FP32 sums: rounded once, or added once.
TEST(EmulatorWeightGradients, EveryFormOfDeliveryIsTheFp32SumRoundedOrAddedOnce) {
  LayerCase c = marked_case(make_shape(64, 40, 6, 2, 24), {60, 75}, 73);
  route_within(c, 1, 5);
  for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
    EmulatedLayer layer = make_layer(c, setup);
    const Results sums = run_step(layer, c);

    Results bf16(c, GradDtype::kBf16);
    run_step(layer, c, bf16);
    for (const Buffer buffer : kBuffers) {
      expect_same_bits("written as BF16", (bf16.gradients.*buffer).bf16, rounded((sums.gradients.*buffer).f32));
    }

    Results f32_added(c);
    Results bf16_added(c, GradDtype::kBf16);
    f32_added.gradients.accumulate = bf16_added.gradients.accumulate = true;
    for (const Buffer buffer : kBuffers) {
      std::vector<float>& f32 = (f32_added.gradients.*buffer).f32;
      for (std::size_t i = 0; i < f32.size(); ++i) f32[i] = 0.375f * static_cast<float>(i % 17) - 2.0f;
      (bf16_added.gradients.*buffer).bf16 = rounded(f32);
    }
    std::vector<std::vector<float>> wanted_f32;
    std::vector<std::vector<Bf16>> wanted_bf16;
    for (const Buffer buffer : kBuffers) {
      std::vector<float> f32 = (f32_added.gradients.*buffer).f32;
      std::vector<Bf16> bf16_sum;
      for (std::size_t i = 0; i < f32.size(); ++i) {
        const float sum = (sums.gradients.*buffer).f32[i];
        bf16_sum.push_back(to_bf16(to_float((bf16_added.gradients.*buffer).bf16[i]) + sum));
        f32[i] += sum;
      }
      wanted_f32.push_back(f32);
      wanted_bf16.push_back(bf16_sum);
    }
    run_step(layer, c, f32_added);
    run_step(layer, c, bf16_added);
    for (std::size_t i = 0; i < std::size(kBuffers); ++i) {
      expect_same_bits("added as FP32", (f32_added.gradients.*kBuffers[i]).f32, wanted_f32[i]);
      expect_same_bits("added as BF16", (bf16_added.gradients.*kBuffers[i]).bf16, wanted_bf16[i]);
    }
    for (const Results* results : {&bf16, &f32_added, &bf16_added}) expect_same_token_results(*results, sums);
  }
}

// ---- Contexts

// What was saved and what is recomputed agree bit for bit, wherever the capacity ends.
TEST(EmulatorContexts, SavedAndRecomputedRowsGiveTheSameBits) {
  LayerCase c = marked_case(make_shape(64, 264, 6, 3, 40), {70, 95, 20}, 74);
  c.shape.clamp = 0.7f;
  c.shape.shared_clamp = 0.4f;
  mask_routes(c, 20, 4);
  for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
    const Results saved = expect_two_steps_match(c, setup);
    for (const std::int64_t rows : {0, 1, 129, 300, 100000}) {
      SCOPED_TRACE(testing::Message() << "saved rows " << rows);
      setup.options.saved_rows = rows;
      const Results results = run_case(c, setup);
      expect_same_results(results, saved);
      if (rows == 0) {
        EXPECT_LT(results.context.bytes(), saved.context.bytes() / 2);
      }
    }
  }
}

}  // namespace
}  // namespace moewave::test
