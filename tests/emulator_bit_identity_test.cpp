// Promises about bits. The output and the gradients of tokens and router weights do not depend on how the work is cut
// or spread; weight gradients do not depend on the minibatch and the SMs. And nothing depends on time.
#include <gtest/gtest.h>

#include "support/emulated.h"

namespace moewave::test {
namespace {

LayerCase identity_case() {
  LayerCase c = random_case(make_shape(64, 136, 9, 3, 40), {240}, 120, "zipf:1");
  mask_routes(c, 10, 6);
  for (std::size_t i = 0; i < c.batch.topk_ids.size(); i += 30) c.batch.topk_ids[i + 1] = c.batch.topk_ids[i];
  return c;
}

std::vector<Tuning> cuts() {
  std::vector<Tuning> result;
  for (const std::int64_t ring_tokens : {0, 1, 100}) {
    for (const std::int64_t ring_rows : {0, 1, 300}) {
      result.push_back({.ring_tokens = ring_tokens, .ring_rows = ring_rows, .sms = 3, .comm_sms = 1});
    }
  }
  return result;
}

TEST(EmulatorBitIdentity, TokenResultsDoNotDependOnRanksRingMinibatchOrSms) {
  const LayerCase c = identity_case();
  const Results wanted = expect_two_steps_match(c);
  std::vector<Tokens> splits = {{240}, {10, 230}, {0, 200, 40}, {1, 0, 0, 239}};
  for (const int ranks : {2, 3, 4, 8, 10}) splits.push_back(even_split(240, ranks));
  for (const Tokens& tokens : splits) {
    const LayerCase spread = split(c, tokens);
    const ReferenceResult reference = run_reference(spread.shape, spread.weights, spread.batch, true);
    for (const Tuning& cut : cuts()) {
      SCOPED_TRACE(testing::Message() << tokens.size() << " ranks, ring " << cut.ring_tokens << " tokens, "
                                      << cut.ring_rows << " rows");
      LayerSetup setup;
      setup.tuning = cut;
      const Results results = run_case(spread, setup);
      expect_same_token_results(results, wanted);
      expect_matches(spread, results, reference);
    }
  }
}

TEST(EmulatorBitIdentity, NoResultDependsOnMinibatchOrSms) {
  const LayerCase c = split(identity_case(), {60, 100, 0, 80});
  for (const Tuning& cut : cuts()) {
    LayerSetup setup;
    setup.tuning = cut;
    const Results wanted = run_case(c, setup);
    for (const std::int64_t minibatch : {1, 200, 1000000}) {
      for (const auto& [sms, comm_sms] : std::vector<std::pair<int, int>>{{2, 1}, {3, 2}, {8, 3}}) {
        SCOPED_TRACE(testing::Message() << "ring " << cut.ring_tokens << " tokens, " << cut.ring_rows
                                        << " rows, minibatch " << minibatch << ", " << sms << " SMs");
        setup.tuning.minibatch_rows = minibatch;
        setup.tuning.sms = sms;
        setup.tuning.comm_sms = comm_sms;
        expect_same_results(run_case(c, setup), wanted);
      }
    }
  }
}

TEST(EmulatorBitIdentity, NoResultDependsOnDelays) {
  const LayerCase c = split(identity_case(), {60, 100, 80});
  for (LayerSetup setup : {LayerSetup{}, tiny_ring()}) {
    setup.tuning.sms = 4;
    setup.tuning.comm_sms = 2;
    const Results wanted = run_case(c, setup);
    setup.options.jitter_us = 2000;
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      setup.options.jitter_seed = seed;
      expect_same_results(run_case(c, setup), wanted);
    }
  }
}

// B119, with fewer repeats and a smaller hidden size.
TEST(EmulatorBitIdentity, ManyExpertsAndRoutesGiveTheSameBitsEveryRun) {
  const LayerCase c = random_case(make_shape(16, 8, 128, 16), even_split(4097, 3), 121);
  LayerSetup setup;
  setup.tuning.ring_tokens = 1000;
  EmulatedLayer layer = make_layer(c, setup);
  const Results wanted = run_step(layer, c);
  expect_matches(c, wanted);
  for (int repeat = 0; repeat < 3; ++repeat) expect_same_results(run_step(layer, c), wanted);
}

// A token's results do not depend on the other tokens either.
TEST(EmulatorBitIdentity, ATokenAloneHasTheSameBitsAsInABatch) {
  const LayerCase c = split(identity_case(), {100, 140});
  const Results batch = run_case(c);
  for (const std::int64_t token : {0, 77, 239}) {
    LayerCase alone = c;
    alone.batch.tokens_per_rank = {0, 1};
    alone.batch.hidden_states = row_of(c.batch.hidden_states, token, c.shape.hidden);
    alone.batch.grad_output = row_of(c.batch.grad_output, token, c.shape.hidden);
    alone.batch.topk_ids = row_of(c.batch.topk_ids, token, c.shape.topk);
    alone.batch.topk_weights = row_of(c.batch.topk_weights, token, c.shape.topk);
    const Results results = run_case(alone);
    expect_same_bits("output", results.output, row_of(batch.output, token, c.shape.hidden));
    expect_same_bits("grad_hidden_states", results.gradients.hidden_states,
                     row_of(batch.gradients.hidden_states, token, c.shape.hidden));
    expect_same_bits("grad_topk_weights", results.gradients.topk_weights,
                     row_of(batch.gradients.topk_weights, token, c.shape.topk));
  }
}

}  // namespace
}  // namespace moewave::test
