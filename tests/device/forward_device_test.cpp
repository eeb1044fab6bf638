// Promises of the forward layer on GPUs: results within BF16 rounding of the FP64 reference for every legal shape,
// routing and cut of the work.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device/cuda_run.h"

namespace moewave::test {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 8};

// ---- Shapes

struct ShapeCase {
  LayerShape shape;
  std::int64_t tokens;  // of all ranks
};

class ShapesAndRanks : public ::testing::TestWithParam<std::tuple<ShapeCase, int>> {};

TEST_P(ShapesAndRanks, TheOutputIsThatOfTheReference) {
  const auto& [c, ranks] = GetParam();
  expect_two_calls_match(random_case(c.shape, even_split(c.tokens, ranks), 11));
}

INSTANTIATE_TEST_SUITE_P(
    CudaForward, ShapesAndRanks,
    ::testing::Combine(::testing::Values(ShapeCase{make_shape(8, 8, 8, 2), 100},         // smaller than every tile
                                         ShapeCase{make_shape(64, 32, 9, 3), 257},       //
                                         ShapeCase{make_shape(264, 136, 10, 4), 300},    // odd in every direction
                                         ShapeCase{make_shape(512, 776, 16, 2), 333},    //
                                         ShapeCase{make_shape(136, 264, 4, 4), 130},     //
                                         ShapeCase{make_shape(1024, 512, 32, 8), 800}),  // whole tiles
                       ::testing::ValuesIn(kRanks)),
    [](const auto& info) {
      const LayerShape& shape = std::get<0>(info.param).shape;
      std::string name;
      for (const auto& [letter, value] : {std::pair{"H", shape.hidden}, std::pair{"I", shape.intermediate},
                                          std::pair{"E", shape.experts}, std::pair{"k", shape.topk}}) {
        name.append(letter).append(std::to_string(value));
      }
      return name.append("Ranks").append(std::to_string(std::get<1>(info.param)));
    });

// ---- Tokens

class OnRanks : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(CudaForward, OnRanks, ::testing::ValuesIn(kRanks), ::testing::PrintToStringParamName());

TEST_P(OnRanks, NoTokensAtAllAreLegal) {
  CudaRun run(random_case(make_shape(64, 32, 8, 2), Tokens(static_cast<std::size_t>(ranks()), 0), 1));
  const LayerCase c = random_case(make_shape(64, 32, 8, 2), Tokens(static_cast<std::size_t>(ranks()), 0), 1);
  EXPECT_TRUE(run.run(c.batch).empty());
  EXPECT_TRUE(run.run(c.batch).empty());
}

TEST_P(OnRanks, SomeRanksHaveNoTokens) {
  Tokens tokens(static_cast<std::size_t>(ranks()), 0);
  tokens.back() = 150;
  expect_two_calls_match(random_case(make_shape(264, 136, 10, 3), tokens, 2));
}

TEST_P(OnRanks, TokenCountsMayDifferAndChangeFromCallToCall) {
  const LayerShape shape = make_shape(264, 136, 10, 3, 40);
  LayerCase first = random_case(shape, Tokens(static_cast<std::size_t>(ranks()), 200), 3);
  CudaRun run(first);
  for (int call = 0; call < 6; ++call) {
    Tokens tokens;
    for (int rank = 0; rank < ranks(); ++rank) tokens.push_back((call * 67 + rank * 131) % 201);
    first.batch = random_case(shape, tokens, 30 + static_cast<std::uint64_t>(call)).batch;
    expect_matches(first, run.run(first.batch));
  }
}

TEST_P(OnRanks, OneToken) {
  Tokens tokens(static_cast<std::size_t>(ranks()), 0);
  tokens[0] = 1;
  expect_two_calls_match(random_case(make_shape(512, 256, 16, 8), tokens, 4));
}

// ---- Ids

TEST_P(OnRanks, MaskedRoutesCountNothing) {
  LayerCase c = random_case(make_shape(264, 136, 10, 4), even_split(300, ranks()), 5);
  mask_routes(c, 40, 6);
  expect_two_calls_match(c);
}

TEST_P(OnRanks, WithAllRoutesMaskedTheOutputIsZero) {
  LayerCase c = random_case(make_shape(64, 32, 8, 2), even_split(100, ranks()), 6);
  mask_routes(c, 100, 7);
  const std::vector<Bf16> output = expect_two_calls_match(c);
  expect_zeros("output", output, 0, static_cast<std::int64_t>(output.size()));
}

TEST_P(OnRanks, AnIdTwiceInATokenCountsTwice) {
  LayerCase c = random_case(make_shape(264, 136, 10, 4), even_split(200, ranks()), 8);
  route(c, [](std::int64_t token, std::int64_t slot) { return (token + slot / 2) % 10; });
  expect_two_calls_match(c);
}

TEST_P(OnRanks, EveryExpertOfEveryToken) {
  expect_two_calls_match(random_case(make_shape(136, 72, 8, 8), even_split(200, ranks()), 9));
}

TEST_P(OnRanks, ExpertsThatDoNotDivideByTheRanks) {
  expect_two_calls_match(marked_case(make_shape(136, 72, 13, 3), even_split(200, ranks()), 10));
}

TEST_P(OnRanks, FewerExpertsThanRanks) {
  expect_two_calls_match(marked_case(make_shape(136, 72, 2, 2), even_split(200, ranks()), 12));
  expect_two_calls_match(marked_case(make_shape(136, 72, 1, 1), even_split(200, ranks()), 13));
}

TEST_P(OnRanks, EveryTokenToOneExpert) {
  expect_two_calls_match(random_case(make_shape(264, 136, 16, 1), even_split(700, ranks()), 14, "single:3"));
  expect_two_calls_match(random_case(make_shape(264, 136, 16, 4), even_split(300, ranks()), 15, "zipf:2"));
}

TEST_P(OnRanks, IdsOf64BitsAreUnderstood) {
  LayerCase c = random_case(make_shape(264, 136, 10, 4), even_split(200, ranks()), 16);
  mask_routes(c, 20, 17);
  CudaSetup setup;
  setup.id_type = IdType::kInt64;
  const std::vector<Bf16> output = expect_two_calls_match(c, setup);
  expect_same_bits("output by 32-bit ids", CudaRun(c).run(c.batch), output);
}

// ---- Layers

TEST_P(OnRanks, ASharedExpertOfItsOwnWidth) {
  for (const std::int64_t width : {8, 200, 512}) {
    LayerCase c = random_case(make_shape(264, 136, 10, 3, width), even_split(300, ranks()), 18);
    expect_two_calls_match(c);
    mask_routes(c, 100, 19);
    expect_two_calls_match(c);
  }
}

TEST_P(OnRanks, ClampsOfRoutedAndSharedExperts) {
  LayerShape shape = make_shape(264, 136, 10, 3, 104);
  shape.clamp = 0.4f;
  expect_two_calls_match(random_case(shape, even_split(300, ranks()), 20));
  shape.shared_clamp = 0.2f;
  expect_two_calls_match(random_case(shape, even_split(300, ranks()), 21));
}

TEST_P(OnRanks, GateAndUpMayLieApartInEitherOrder) {
  const LayerCase c = random_case(make_shape(264, 136, 10, 3), even_split(200, ranks()), 22);
  const std::vector<Bf16> wanted = CudaRun(c).run(c.batch);
  CudaSetup apart;
  apart.separate_gate_and_up = true;
  expect_same_bits("output", CudaRun(c, apart).run(c.batch), wanted);
  apart.up_first = true;
  expect_same_bits("output with up before gate", CudaRun(c, apart).run(c.batch), wanted);
}

// ---- How the work is cut

TEST_P(OnRanks, TheSmallestRingAndMinibatch) {
  LayerCase c = random_case(make_shape(264, 136, 10, 4, 72), even_split(700, ranks()), 23);
  mask_routes(c, 10, 24);
  expect_two_calls_match(c, tiny_ring());
}

TEST_P(OnRanks, NoCutOfTheWorkChangesABit) {
  const LayerCase c = random_case(make_shape(264, 264, 10, 4, 72), even_split(900, ranks()), 25);
  const std::vector<Bf16> wanted = CudaRun(c).run(c.batch);
  std::vector<CudaSetup> setups(7);
  setups[1].tuning.minibatch_rows = 1;
  setups[2].tuning.minibatch_rows = 700;
  setups[3].tuning.ring_tokens = 1;
  setups[4] = tiny_ring();
  setups[5].tuning = {.sms = 5, .comm_sms = 1};
  setups[6].tuning = {.sms = 16, .comm_sms = 15};
  for (std::size_t i = 0; i < setups.size(); ++i) {
    CudaRun run(c, setups[i]);
    for (int call = 0; call < 3; ++call) {
      expect_same_bits("output of setup " + std::to_string(i), run.run(c.batch), wanted);
    }
  }
}

TEST(CudaForward, TheNumberOfRanksChangesNoBit) {
  LayerCase c = random_case(make_shape(512, 264, 24, 6, 136), {600}, 26);
  mask_routes(c, 10, 27);
  const std::vector<Bf16> wanted = CudaRun(c).run(c.batch);
  for (const int ranks : {2, 3, 4, 8}) {
    const LayerCase spread_out = split(c, even_split(600, ranks));
    expect_same_bits("output on " + std::to_string(ranks) + " ranks", CudaRun(spread_out).run(spread_out.batch),
                     wanted);
  }
  const LayerCase uneven = split(c, {1, 0, 500, 99});
  expect_same_bits("output on uneven ranks", CudaRun(uneven).run(uneven.batch), wanted);
}

TEST_P(OnRanks, TheReportIsThatOfTheEmulator) {
  LayerCase c = random_case(make_shape(64, 32, 10, 3), even_split(300, ranks()), 28);
  mask_routes(c, 10, 29);
  CudaSetup setup;
  setup.tuning.minibatch_rows = 256;
  setup.tuning.ring_tokens = 64;
  CudaRun run(c, setup);
  run.run(c.batch);
  const CallReport got = run.layer().report();
  Tuning tuning = run.layer().tuning();
  tuning.sms = 2, tuning.comm_sms = 1;
  EmulatedLayer emulator(c.shape, c.ranks(), c.max_tokens(), tuning);
  std::vector<Bf16> output;
  CallReport wanted;
  emulator.forward(c.weights, c.batch, output, nullptr, &wanted);
  EXPECT_EQ(got.pulled_bytes, wanted.pulled_bytes);
  EXPECT_EQ(got.pushed_bytes, wanted.pushed_bytes);
  EXPECT_EQ(got.expert_rows, wanted.expert_rows);
  ASSERT_EQ(got.ranks.size(), wanted.ranks.size());
  for (std::size_t rank = 0; rank < got.ranks.size(); ++rank) {
    EXPECT_EQ(got.ranks[rank].rows, wanted.ranks[rank].rows);
    EXPECT_EQ(got.ranks[rank].padded_rows, wanted.ranks[rank].padded_rows);
    EXPECT_EQ(got.ranks[rank].routes, wanted.ranks[rank].routes);
    EXPECT_EQ(got.ranks[rank].pulled_tokens, wanted.ranks[rank].pulled_tokens);
    EXPECT_EQ(got.ranks[rank].macrobatches, wanted.ranks[rank].macrobatches);
    EXPECT_EQ(got.ranks[rank].minibatches, wanted.ranks[rank].minibatches);
  }
}

TEST_P(OnRanks, TheTimelineShowsEveryBlock) {
  const LayerCase c = random_case(make_shape(264, 136, 10, 3), even_split(300, ranks()), 31);
  CudaSetup setup;
  setup.options.timeline_events = 1000;
  setup.tuning = {.sms = 6, .comm_sms = 2};
  CudaRun run(c, setup);
  run.run(c.batch);
  expect_matches(c, run.run(c.batch));
  std::vector<int> merges(static_cast<std::size_t>(ranks() * 6), 0);
  for (const TimelineEvent& event : run.layer().timeline()) {
    EXPECT_LE(0, event.begin_ns);
    EXPECT_LE(event.begin_ns, event.end_ns);
    EXPECT_LT(event.end_ns, 60'000'000'000);
    if (event.name == std::string("merge")) ++merges[static_cast<std::size_t>(event.rank * 6 + event.sm)];
  }
  EXPECT_EQ(merges, std::vector<int>(merges.size(), 1));
}

// ---- Values

TEST_P(OnRanks, NanInATokenSpreadsToThatTokenOnly) {
  LayerCase c = random_case(make_shape(264, 136, 10, 3, 72), even_split(300, ranks()), 32);
  CudaRun run(c);
  const std::vector<Bf16> clean = run.run(c.batch);
  for (const std::int64_t token : {0, 150, 299}) {
    HostBatch batch = c.batch;
    batch.hidden_states[static_cast<std::size_t>(token * 264 + 5)] = Bf16{0x7fc0};
    const std::vector<Bf16> output = run.run(batch);
    for (std::int64_t row = 0; row < 300; ++row) {
      const std::vector<Bf16> got = row_of(output, row, 264);
      if (row != token) {
        expect_same_bits("row " + std::to_string(row), got, row_of(clean, row, 264));
        continue;
      }
      for (const Bf16 value : got) EXPECT_TRUE(std::isnan(to_float(value)));
    }
  }
}

}  // namespace
}  // namespace moewave::test
