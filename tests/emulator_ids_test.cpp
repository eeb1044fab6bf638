// Promises about expert ids: masked, repeated, out of range, and what the reports say of them.
#include <gtest/gtest.h>

#include <set>

#include "support/emulated.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

// B22: 30 % masked, token 5 masked fully, expert 3 only ever masked.
TEST(EmulatorIds, MaskedRoutesContributeNothing) {
  for (const std::int64_t shared : {0, 24}) {
    LayerCase c = marked_case(make_shape(64, 32, 8, 4, shared), {40, 24}, 30);
    mask_routes(c, 30, 1);
    for (std::size_t i = 5 * 4; i < 6 * 4; ++i) c.batch.topk_ids[i] = -1;
    for (std::int32_t& id : c.batch.topk_ids) id = id == 3 ? -1 : id;
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
      const Results results = expect_two_steps_match(c, setup);
      for (std::size_t i = 0; i < c.batch.topk_ids.size(); ++i) {
        if (c.batch.topk_ids[i] == -1) {
          EXPECT_EQ(results.gradients.topk_weights[i], 0.0f) << "route " << i;
        }
      }
      if (shared == 0) expect_zeros("output", results.output, 5 * 64, 6 * 64);
      EXPECT_EQ(results.forward_report.expert_rows[3], 0);
    }
  }
}

TEST(EmulatorIds, WeightsOfMaskedRoutesMayBeAnything) {
  LayerCase c = marked_case(make_shape(64, 32, 8, 4), {40, 24}, 31);
  mask_routes(c, 30, 2);
  const Results clean = run_case(c);
  for (std::size_t i = 0; i < c.batch.topk_ids.size(); ++i) {
    if (c.batch.topk_ids[i] == -1) c.batch.topk_weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  expect_same_results(run_case(c), clean);
}

// B24: [3,3,5,5] for one, all and random tokens.
TEST(EmulatorIds, AnExpertNamedTwiceByATokenCountsTwice) {
  for (const Tokens& tokens : {Tokens{1, 0}, Tokens{9, 7}, Tokens{200, 56}}) {
    for (const std::int64_t every : {0, 1, 3}) {
      LayerCase c = marked_case(make_shape(64, 32, 8, 4), tokens, 32);
      const HostBatch before = c.batch;
      route(c, [&](std::int64_t token, std::int64_t slot) -> std::int64_t {
        const bool repeats = every == 0 ? token == 0 : token % every == 0;
        return repeats ? (slot < 2 ? 3 : 5) : before.topk_ids[static_cast<std::size_t>(token * 4 + slot)];
      });
      const Results results = expect_two_steps_match(c);
      // Both slots of one expert see the same dh and h.
      EXPECT_EQ(results.gradients.topk_weights[0], results.gradients.topk_weights[1]);
      EXPECT_EQ(results.gradients.topk_weights[2], results.gradients.topk_weights[3]);
      expect_same_token_results(run_case(c, tiny_ring()), results);
    }
  }
}

TEST(EmulatorIds, OneExpertInEverySlotIsRight) {
  LayerCase c = marked_case(make_shape(64, 32, 8, 8), {50, 50}, 33);
  route(c, [](std::int64_t, std::int64_t) { return 6; });
  for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
    const Results results = expect_two_steps_match(c, setup);
    EXPECT_EQ(results.forward_report.ranks[1].pulled_tokens, 50);  // once each, though eight rows use it
  }
}

// B26.
TEST(EmulatorIds, AllExpertsChosenIsADenseMixtureAndMoreRoutesThanExpertsAreRefused) {
  for (const int ranks : {1, 2, 3})
    expect_two_steps_match(marked_case(make_shape(64, 32, 8, 8), even_split(64, ranks), 34));
  EXPECT_NE(refusal([] { EmulatedLayer(make_shape(64, 32, 8, 9), 2, 64); }).find("topk is 9"), std::string::npos);
}

// B28, and the statistics of dispatch that follow from the ids: each token is pulled once by a rank that needs it.
TEST(EmulatorIds, ReportedCountsAreTheHistogramOfTheIds) {
  for (const int kind : {0, 1, 2}) {
    LayerCase c = marked_case(make_shape(32, 16, 7, 4), {60, 0, 75}, 35);
    if (kind == 1) mask_routes(c, 40, 3);
    if (kind == 2) route(c, [](std::int64_t token, std::int64_t slot) { return (token + slot / 2) % 7; });
    std::vector<std::int64_t> histogram(7, 0);
    std::vector<std::set<std::int64_t>> remote_tokens(3);
    std::vector<std::int64_t> routes(3, 0);
    std::int64_t remote_rows = 0;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(c.batch.topk_ids.size()); ++i) {
      const std::int32_t id = c.batch.topk_ids[static_cast<std::size_t>(i)];
      if (id < 0) continue;
      const std::int64_t token = i / 4;
      const int owner = id < 3 ? 0 : (id < 5 ? 1 : 2);  // 7 experts over 3 ranks: 3, 2, 2
      const int source = token < 60 ? 0 : 2;
      ++histogram[static_cast<std::size_t>(id)];
      ++routes[static_cast<std::size_t>(source)];
      if (owner != source) remote_tokens[static_cast<std::size_t>(owner)].insert(token), ++remote_rows;
    }
    for (const LayerSetup& setup : {LayerSetup{}, tiny_ring()}) {
      const Results results = run_case(c, setup);
      for (const CallReport* report : {&results.forward_report, &results.backward_report}) {
        EXPECT_EQ(report->expert_rows, histogram);
        const std::int64_t row_bytes = 32 * 2;
        std::int64_t pushed = 0;
        for (std::size_t rank = 0; rank < 3; ++rank) {
          const RankStats& stats = report->ranks[rank];
          const std::int64_t pulled = static_cast<std::int64_t>(remote_tokens[rank].size());
          EXPECT_EQ(stats.tokens, c.batch.tokens_per_rank[rank]);
          EXPECT_EQ(stats.routes, routes[rank]);
          EXPECT_EQ(stats.pulled_tokens, pulled);
          EXPECT_EQ(stats.pulled_bytes, pulled * row_bytes * (report->backward ? 2 : 1));
          pushed += stats.pushed_bytes;
        }
        EXPECT_EQ(pushed, remote_rows * row_bytes);
      }
    }
  }
}

// Design: treated as -1 everywhere, all ranks finish, the lowest (rank, token, slot) is named.
TEST(EmulatorIds, IdsOutOfRangeAreRefusedByPlaceAndTheNextRunIsRight) {
  const LayerCase good = marked_case(make_shape(64, 32, 8, 3), {20, 30}, 36);
  EmulatedLayer layer = make_layer(good);
  const Results wanted = run_step(layer, good);
  for (const std::int32_t bad_id :
       {8, -2, 100000, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    LayerCase bad = good;
    bad.batch.topk_ids[(20 + 4) * 3 + 2] = bad_id;
    bad.batch.topk_ids[(20 + 7) * 3] = -7;
    Results of_bad(bad);
    Results of_good(good);
    Results after(good);
    const std::vector<EmulatedCall> calls = {forward_call(good, of_good), backward_call(good, of_good),
                                             forward_call(bad, of_bad),   backward_call(bad, of_bad),
                                             forward_call(good, after),   backward_call(good, after)};
    const std::string message = refusal([&] { layer.run(calls); });
    EXPECT_NE(message.find("rank 1, token 4, slot 2 is " + std::to_string(bad_id)), std::string::npos) << message;
    EXPECT_NE(message.find("-1 to 7"), std::string::npos) << message;
    expect_same_results(of_good, wanted);
    expect_same_results(after, wanted);
    expect_same_results(run_step(layer, good), wanted);

    // Not promised to the caller, whose call is refused, but what keeps every rank within its bounds.
    LayerCase masked = good;
    masked.batch.topk_ids[(20 + 4) * 3 + 2] = masked.batch.topk_ids[(20 + 7) * 3] = -1;
    expect_same_results(of_bad, run_step(layer, masked));
  }
}

}  // namespace
}  // namespace moewave::test
