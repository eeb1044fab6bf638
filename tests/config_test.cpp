// Promises of the checks: what is illegal is refused by a line that names the value and what is allowed.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "moewave/host_layer.h"

namespace moewave {
namespace {

/// The message of the InputError that `action` throws; empty when it throws none.
std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

void expect_refusal(const std::function<void()>& action, const std::vector<std::string>& parts) {
  const std::string message = refusal(action);
  EXPECT_FALSE(message.empty()) << "accepted; expected a message with " << parts.front();
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << " | " << part;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

LayerShape legal_shape() {
  LayerShape shape;
  shape.hidden = 16;
  shape.intermediate = 8;
  shape.experts = 6;
  shape.topk = 2;
  shape.shared_intermediate = 24;
  return shape;
}

// ---- Layer shape
// -------------------------------------------------------------------------------------------------------

TEST(LayerShapeCheck, LegalShapesPass) {
  EXPECT_NO_THROW(validate(legal_shape(), 1));
  for (const std::int64_t experts : {1, 2, 3, 64, 255, 256, 257, 384, 512, 4096}) {
    LayerShape shape = legal_shape();
    shape.experts = experts;
    for (const std::int64_t topk : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 32, 64}) {
      shape.topk = topk;
      EXPECT_EQ(refusal([&] { validate(shape, 8); }).empty(), topk <= experts) << experts << " " << topk;
    }
  }
  for (const auto& [hidden, intermediate] :
       {std::pair{2048, 768}, {4096, 1536}, {2880, 2880}, {3072, 1536}, {7168, 2048}, {5120, 1536}}) {
    LayerShape shape = legal_shape();
    shape.hidden = hidden;
    shape.intermediate = intermediate;
    EXPECT_NO_THROW(validate(shape, 8));
  }
}

TEST(LayerShapeCheck, MoreRanksThanExpertsAreLegal) {
  EXPECT_NO_THROW(validate(legal_shape(), 7));
  EXPECT_NO_THROW(validate(legal_shape(), kMaxRanks));
}

TEST(LayerShapeCheck, IllegalValuesAreNamedWithWhatIsAllowed) {
  struct Illegal {
    std::function<void(LayerShape&)> change;
    std::vector<std::string> message;
  };
  const std::string multiple = "must be a multiple of 8 and at least 8";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<Illegal> table = {
      {[](LayerShape& s) { s.hidden = 100; }, {"hidden is 100; it " + multiple}},
      {[](LayerShape& s) { s.hidden = 0; }, {"hidden is 0; it " + multiple}},
      {[](LayerShape& s) { s.hidden = -8; }, {"hidden is -8; it " + multiple}},
      {[](LayerShape& s) { s.intermediate = 43; }, {"intermediate is 43; it " + multiple}},
      {[](LayerShape& s) { s.intermediate = 0; }, {"intermediate is 0; it " + multiple}},
      {[](LayerShape& s) { s.experts = 0; }, {"experts is 0", "1 to 4096"}},
      {[](LayerShape& s) { s.experts = -3; }, {"experts is -3", "1 to 4096"}},
      {[](LayerShape& s) { s.experts = 4097; }, {"experts is 4097", "1 to 4096"}},
      {[](LayerShape& s) { s.topk = 0; }, {"topk is 0", "1 to 6"}},
      {[](LayerShape& s) { s.topk = -1; }, {"topk is -1", "1 to 6"}},
      {[](LayerShape& s) { s.topk = 7; }, {"topk is 7", "1 to 6", "the 6 experts"}},
      {[](LayerShape& s) { s.experts = 128, s.topk = 65; }, {"topk is 65", "1 to 64"}},
      {[](LayerShape& s) { s.shared_intermediate = 12; }, {"shared_intermediate is 12", "multiple of 8"}},
      {[](LayerShape& s) { s.shared_intermediate = -8; }, {"shared_intermediate is -8", "0 (no shared expert)"}},
      {[](LayerShape& s) { s.clamp = 0.0f; }, {"clamp is 0", "finite and greater than 0"}},
      {[](LayerShape& s) { s.clamp = -1.5f; }, {"clamp is -1.5", "finite and greater than 0"}},
      {[=](LayerShape& s) { s.clamp = nan; }, {"clamp is nan", "finite and greater than 0"}},
      {[=](LayerShape& s) { s.clamp = infinity; }, {"clamp is inf", "finite and greater than 0"}},
      {[=](LayerShape& s) { s.shared_clamp = -infinity; }, {"shared_clamp is -inf", "finite and greater than 0"}},
      {[](LayerShape& s) { s.shared_clamp = 0.0f; }, {"shared_clamp is 0", "finite and greater than 0"}},
      {[](LayerShape& s) { s.hidden = s.intermediate = std::int64_t{1} << 40; },
       {"gate_up", "1099511627776", "too large"}},
      {[](LayerShape& s) { s.hidden = std::int64_t{1} << 62; }, {"gate_up", "4611686018427387904", "too large"}},
      {[](LayerShape& s) { s.shared_intermediate = std::int64_t{1} << 61; }, {"shared_gate", "too large"}},
  };
  for (const Illegal& illegal : table) {
    LayerShape shape = legal_shape();
    illegal.change(shape);
    expect_refusal([&] { validate(shape, 2); }, illegal.message);
  }
}

TEST(LayerShapeCheck, RanksOutsideTheirLimitsAreRefused) {
  expect_refusal([] { validate(legal_shape(), 0); }, {"ranks is 0", "1 to 1024"});
  expect_refusal([] { validate(legal_shape(), -1); }, {"ranks is -1", "1 to 1024"});
  expect_refusal([] { validate(legal_shape(), 1025); }, {"ranks is 1025", "1 to 1024"});
}

// ---- Tuning
// ------------------------------------------------------------------------------------------------------------

TEST(TuningCheck, ZerosAndAnyPositiveValuesPass) {
  EXPECT_NO_THROW(validate(Tuning{}));
  for (const std::int64_t rows : {1, 127, 128, 1'000'000}) {
    EXPECT_NO_THROW(validate(Tuning{.minibatch_rows = rows, .ring_tokens = rows, .ring_rows = rows}));
  }
  EXPECT_NO_THROW(validate(Tuning{.sms = 2, .comm_sms = 1}));
  EXPECT_NO_THROW(validate(Tuning{.sms = 8}));
  EXPECT_NO_THROW(validate(Tuning{.comm_sms = 3}));
}

TEST(TuningCheck, IllegalValuesAreNamedWithWhatIsAllowed) {
  expect_refusal([] { validate(Tuning{.minibatch_rows = -1}); }, {"minibatch_rows is -1", "at least 1, or 0"});
  expect_refusal([] { validate(Tuning{.ring_tokens = -2}); }, {"ring_tokens is -2", "at least 1, or 0"});
  expect_refusal([] { validate(Tuning{.ring_rows = -3}); }, {"ring_rows is -3", "at least 1, or 0"});
  expect_refusal([] { validate(Tuning{.sms = -4}); }, {"sms is -4", "at least 1, or 0"});
  expect_refusal([] { validate(Tuning{.comm_sms = -5}); }, {"comm_sms is -5", "at least 1, or 0"});
  expect_refusal([] { validate(Tuning{.sms = 1}); }, {"sms is 1", "at least 2"});
  expect_refusal([] { validate(Tuning{.sms = 8, .comm_sms = 8}); }, {"comm_sms is 8", "1 to 7"});
  expect_refusal([] { validate(Tuning{.sms = 8, .comm_sms = 9}); }, {"comm_sms is 9", "1 to 7"});
}

// ---- Shares
// ------------------------------------------------------------------------------------------------------------

TEST(Shares, ExpertsLieInContiguousRangesTheFirstRanksHoldingOneMore) {
  for (const std::int64_t experts : {1, 2, 7, 8, 255, 4096}) {
    for (const int ranks : {1, 2, 3, 4, 8, 72, 1024}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ExpertRange range = local_experts(experts, ranks, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_EQ(range.size(), experts / ranks + (rank < experts % ranks ? 1 : 0));
        next = range.end;
      }
      EXPECT_EQ(next, experts);
    }
  }
}

TEST(Shares, TokensAreSplitEvenlyTheFirstRanksTakingTheRemainder) {
  EXPECT_EQ(even_share(10, 4, 0), 3);
  EXPECT_EQ(even_share(10, 4, 1), 3);
  EXPECT_EQ(even_share(10, 4, 2), 2);
  EXPECT_EQ(even_share(10, 4, 3), 2);
  EXPECT_EQ(even_share(0, 4, 0), 0);
  EXPECT_EQ(even_share(2, 1024, 1), 1);
  EXPECT_EQ(even_share(2, 1024, 2), 0);
}

// ---- Weights and batches
// -----------------------------------------------------------------------------------------------

HostBatch legal_batch() { return random_batch(legal_shape(), std::vector<std::int64_t>{3, 0, 2}, "uniform", 1, true); }

TEST(WeightsCheck, WrongSizesAreNamedWithWhatTheShapeNeeds) {
  const LayerShape shape = legal_shape();
  const HostWeights legal = random_weights(shape, 1);
  EXPECT_NO_THROW(validate(shape, legal));
  const auto expect = [&](const std::function<void(HostWeights&)>& change, const std::vector<std::string>& message) {
    HostWeights weights = legal;
    change(weights);
    expect_refusal([&] { validate(shape, weights); }, message);
  };
  expect([](HostWeights& w) { w.gate_up.pop_back(); }, {"gate_up has 1535 elements", "[6, 2, 8, 16]", "needs 1536"});
  expect([](HostWeights& w) { w.down.resize(5 * 16 * 8); }, {"down has 640 elements", "[6, 16, 8]", "needs 768"});
  expect([](HostWeights& w) { w.shared_gate.clear(); }, {"shared_gate has 0 elements", "[24, 16]", "needs 384"});
  expect([](HostWeights& w) { w.shared_up.resize(1); }, {"shared_up has 1 element;", "needs 384"});
  expect([](HostWeights& w) { w.shared_down.resize(400); }, {"shared_down has 400 elements", "[16, 24]", "needs 384"});

  LayerShape without = shape;
  without.shared_intermediate = 0;
  expect_refusal([&] { validate(without, legal); }, {"shared_gate has 384 elements", "needs 0"});
}

TEST(BatchCheck, WrongSizesAreNamedWithWhatTheShapeNeeds) {
  EXPECT_NO_THROW(validate(legal_shape(), legal_batch(), true));
  const auto expect = [](const std::function<void(HostBatch&)>& change, const std::vector<std::string>& message) {
    HostBatch batch = legal_batch();
    change(batch);
    expect_refusal([&] { validate(legal_shape(), batch, true); }, message);
  };
  expect([](HostBatch& b) { b.tokens_per_rank.clear(); }, {"tokens_per_rank names 0 ranks", "1 to 1024"});
  expect([](HostBatch& b) { b.tokens_per_rank.assign(1025, 0); }, {"names 1025 ranks", "1 to 1024"});
  expect([](HostBatch& b) { b.tokens_per_rank = {6, -1}; }, {"tokens_per_rank of rank 1 is -1", "0 or more"});
  expect([](HostBatch& b) { b.tokens_per_rank.assign(3, std::numeric_limits<std::int64_t>::max()); },
         {"tokens_per_rank of rank 0 is 9223372036854775807"});
  expect([](HostBatch& b) { b.tokens_per_rank = {std::int64_t{1} << 55}; }, {"hidden_states", "too large"});
  expect([](HostBatch& b) { b.tokens_per_rank = {6}; }, {"hidden_states has 80 elements", "[6, 16]", "needs 96"});
  expect([](HostBatch& b) { b.hidden_states.pop_back(); }, {"hidden_states has 79 elements", "needs 80"});
  expect([](HostBatch& b) { b.topk_ids.pop_back(); }, {"topk_ids has 9 elements", "[5, 2]", "needs 10"});
  expect([](HostBatch& b) { b.topk_weights.push_back(0); }, {"topk_weights has 11 elements", "needs 10"});
  expect([](HostBatch& b) { b.grad_output.pop_back(); }, {"grad_output has 79 elements", "needs 80"});
  expect([](HostBatch& b) { b.grad_output.clear(); }, {"grad_output is missing", "[5, 16]"});
}

TEST(BatchCheck, GradOutputIsNeededForBackwardOnly) {
  HostBatch batch = legal_batch();
  batch.grad_output.clear();
  EXPECT_NO_THROW(validate(legal_shape(), batch, false));
  HostBatch empty;
  empty.tokens_per_rank = {0, 0};
  EXPECT_NO_THROW(validate(legal_shape(), empty, true));
}

TEST(BatchCheck, TheLowestIdOutOfRangeIsNamedByRankTokenAndSlot) {
  for (const std::int32_t id :
       {6, -2, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    HostBatch batch = legal_batch();
    batch.topk_ids[9] = id;
    const std::string value = "is " + std::to_string(id);
    expect_refusal([&] { validate(legal_shape(), batch, true); }, {"rank 2, token 1, slot 1", value, "-1 to 5"});
    batch.topk_ids[2] = id;
    expect_refusal([&] { validate(legal_shape(), batch, true); }, {"rank 0, token 1, slot 0", value, "-1 to 5"});
  }
}

TEST(BatchCheck, MaskedAndRepeatedIdsAreLegal) {
  HostBatch batch = legal_batch();
  batch.topk_ids = {-1, -1, 5, 5, 0, -1, 3, 3, -1, 2};
  EXPECT_NO_THROW(validate(legal_shape(), batch, true));
}

}  // namespace
}  // namespace moewave
