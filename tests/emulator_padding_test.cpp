// Promises about memory that nobody wrote: padding rows, recycled workspaces, buffers of earlier steps.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

// B37: a step on memory full of NaN equals the one before, and equals a step on memory that was never poisoned.
TEST(EmulatorPadding, PoisonedMemoryChangesNoResult) {
  for (const std::int64_t shared : {0, 40}) {
    for (const std::int64_t saved_rows : {-1, 0, 100}) {
      const LayerCase c = marked_case(make_shape(64, 48, 6, 3, shared), {70, 41}, 40);
      for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
        setup.options.saved_rows = saved_rows;
        setup.options.poison = false;
        const Results clean = run_case(c, setup);
        setup.options.poison = true;
        EmulatedLayer layer = make_layer(c, setup);
        for (int step = 0; step < 3; ++step) expect_same_results(run_step(layer, c), clean);
      }
    }
  }
}

// A context that held another batch, and output buffers of a larger one, are memory like any other.
TEST(EmulatorPadding, RecycledContextsAndBuffersChangeNoResult) {
  const LayerShape shape = make_shape(64, 48, 6, 3, 16);
  const LayerCase large = marked_case(shape, {150, 140}, 41);
  const LayerCase c = marked_case(shape, {33, 1}, 42);
  const Results wanted = run_case(c);
  EmulatedLayer layer = make_layer(large);
  Results results(large);
  for (int step = 0; step < 2; ++step) {
    run_step(layer, large, results);
    run_step(layer, c, results);
    expect_same_results(results, wanted);
  }
}

// B39: experts of 1, 33 and 127 rows, one exactly full tile, one of a tile and a row.
TEST(EmulatorPadding, RowCountsThatFillNoTileGiveFiniteAndRightGradients) {
  const std::vector<std::int64_t> counts = {1, 33, 127, 0, 128, 129};
  std::vector<std::int64_t> expert_of;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    expert_of.insert(expert_of.end(), static_cast<std::size_t>(counts[expert]), static_cast<std::int64_t>(expert));
  }
  LayerCase c = marked_case(make_shape(64, 48, 6, 1), {200, 218}, 43);
  route(c, [&](std::int64_t token, std::int64_t) { return expert_of[static_cast<std::size_t>(token * 5 % 418)]; });
  for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
    const Results results = expect_two_steps_match(c, setup);
    EXPECT_EQ(results.forward_report.expert_rows, counts);
  }
}

// B41: padding that is added to a real token would land on token 0.
TEST(EmulatorPadding, TheFirstTokenOfEachRankIsRightForFiftyRoutings) {
  const LayerShape shape = make_shape(64, 32, 8, 2);
  EmulatedLayer layer(shape, 3, 20, LayerSetup{}.tuning, LayerSetup{}.options);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const LayerCase c = marked_case(shape, {17, 20, 3}, 4400 + seed);
    const Results results = run_step(layer, c);
    const ReferenceResult reference = run_reference(shape, c.weights, c.batch, true);
    for (const std::int64_t token : {0, 17, 37}) {
      expect_close("output of a first token", widen(row_of(results.output, token, 64)),
                   row_of(reference.output, token, 64), 64, 8e-3);
      expect_close("dx of a first token", widen(row_of(results.gradients.hidden_states, token, 64)),
                   row_of(reference.grad_hidden_states, token, 64), 64, 8e-3);
    }
    expect_matches(c, results, reference);
  }
}

}  // namespace
}  // namespace moewave::test
