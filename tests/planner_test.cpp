// Promises of the planner: what it fills in, how it rounds, what it refuses.
#include "plan/planner.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>

#include "support/refusal.h"
#include "support/schedule_cases.h"

namespace moewave::test {
namespace {

using plan::make_geometry;
using plan::resolve_tuning;
using protocol::Geometry;
using protocol::kOrderBlockTokens;
using protocol::kTileRows;

LayerShape small_shape() {
  LayerShape shape;
  shape.hidden = 512;
  shape.intermediate = 256;
  shape.experts = 16;
  shape.topk = 4;
  return shape;
}

struct Request {
  LayerShape shape;
  int ranks;
  std::int64_t max_tokens;
  Tuning tuning;
};

Request draw_request() {
  Request r;
  r.shape = small_shape();
  r.shape.experts = draw(1, 99);
  r.shape.topk = draw<std::int64_t>(1, std::min<std::int64_t>(r.shape.experts, 64));
  r.ranks = draw(1, 11);
  r.max_tokens = draw(0, *rc::gen::element(2999, 100));
  r.tuning.minibatch_rows = *rc::gen::element(0, 1) * draw(1, 99999);
  r.tuning.ring_tokens = *rc::gen::element(0, 1) * draw(1, *rc::gen::element(39999, 500));
  r.tuning.ring_rows = *rc::gen::element(0, 1) * draw(1, *rc::gen::element(399999, 2000));
  r.tuning.sms = *rc::gen::element(0, 2, 3, 8, 132);
  r.tuning.comm_sms = *rc::gen::element(0, 1);
  return r;
}

void expect_refusal(const std::function<void()>& action, const std::vector<std::string>& parts) {
  const std::string message = refusal(action);
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << " | " << part;
}

// ---- Minibatch

TEST(Planner, TwoWavesOfThePublishedLayerAre2368Rows) {
  // 148 SMs work as 74 pairs on 256 x 256 tiles; a row tile of gate and up, 2 * 2048 columns, makes 16 tasks.
  EXPECT_EQ(plan::two_wave_rows(148 / 2, 256, 2 * 2048 / 256), 2368);
}

TEST(Planner, TwoWavesRoundUpToTheNextRow) {
  EXPECT_EQ(plan::two_wave_rows(1, 128, 3), 86);
  EXPECT_EQ(plan::two_wave_rows(6, 128, 1), 1536);
}

TEST(Planner, TheDefaultMinibatchKeepsTheComputingSmsBusyForTwoWaves) {
  Tuning tuning;
  tuning.sms = 132;
  tuning.comm_sms = 4;
  LayerShape shape = small_shape();
  shape.hidden = 7168;
  shape.intermediate = 2048;
  const Tuning resolved = resolve_tuning(shape, 2, 8192, tuning);
  // 16 gate-up tasks a tile and 28 down tasks: the fewer decide. 2 * 128 * 128 / 16 = 2048 rows.
  EXPECT_EQ(resolved.minibatch_rows, 2048);
}

// ---- Rounding

RC_GTEST_PROP(Planner, ResolvingWhatWasResolvedChangesNothing, ()) {
  const Request r = draw_request();
  const Tuning once = resolve_tuning(r.shape, r.ranks, r.max_tokens, r.tuning);
  const Tuning twice = resolve_tuning(r.shape, r.ranks, r.max_tokens, once);
  RC_LOG() << "ranks " << r.ranks << ", k " << r.shape.topk << ", max_tokens " << r.max_tokens << ", ring "
           << r.tuning.ring_tokens << '/' << r.tuning.ring_rows << " -> " << once.ring_tokens << '/' << once.ring_rows
           << " -> " << twice.ring_tokens << '/' << twice.ring_rows << '\n';
  RC_ASSERT(twice == once);
  RC_ASSERT(make_geometry(r.shape, r.ranks, r.max_tokens, twice, 0) ==
            make_geometry(r.shape, r.ranks, r.max_tokens, once, 0));
}

RC_GTEST_PROP(Planner, NothingIsLeftOpenAndRequestsAreRoundedUp, ()) {
  const Request r = draw_request();
  const Tuning t = resolve_tuning(r.shape, r.ranks, r.max_tokens, r.tuning);
  RC_ASSERT(t.minibatch_rows >= 1 && t.minibatch_rows % kTileRows == 0);
  RC_ASSERT(t.comm_sms >= 1 && t.comm_sms < t.sms);
  RC_ASSERT(r.tuning.sms == 0 || t.sms == r.tuning.sms);
  RC_ASSERT(r.tuning.comm_sms == 0 || t.comm_sms == r.tuning.comm_sms);
  const Geometry g = make_geometry(r.shape, r.ranks, r.max_tokens, t, 0);
  // No more than what everything needs is ever taken; what was asked for and does not reach that is not cut short,
  // except that no segment has more token copies than rows.
  const std::int64_t every_token = g.max_remote_tokens();
  const std::int64_t every_row = g.max_valid_rows();
  RC_ASSERT(g.segment_tokens >= std::min({every_token, g.segment_rows, protocol::ceil_div(r.tuning.ring_tokens, 2)}));
  RC_ASSERT(g.segment_rows >= std::min(every_row, protocol::ceil_div(r.tuning.ring_rows, 2)));
  RC_ASSERT(g.segment_tokens <= protocol::round_up(every_token, kOrderBlockTokens));
  RC_ASSERT(g.segment_rows <= protocol::round_up(std::max<std::int64_t>(every_row, 1), kTileRows));
  RC_ASSERT(r.tuning.minibatch_rows == 0 || t.minibatch_rows < r.tuning.minibatch_rows + kTileRows);
}

RC_GTEST_PROP(Planner, ASegmentHoldsAtLeastOneBlockOfTheTokenOrder, ()) {
  const Request r = draw_request();
  const Geometry g =
      make_geometry(r.shape, r.ranks, r.max_tokens, resolve_tuning(r.shape, r.ranks, r.max_tokens, r.tuning), 0);
  const std::int64_t tokens = std::min<std::int64_t>(kOrderBlockTokens, r.max_tokens);
  RC_ASSERT(r.ranks == 1 || g.segment_tokens >= tokens);
  RC_ASSERT(g.segment_rows >= tokens * r.shape.topk);
  RC_ASSERT(g.segment_tokens % kOrderBlockTokens == 0);
}

TEST(Planner, ARingThatHoldsAllRemoteTokensIsOneSegment) {
  const LayerShape shape = small_shape();
  for (const std::int64_t ring : {std::int64_t{0}, std::int64_t{300}, std::int64_t{1} << 40}) {
    Tuning tuning;
    tuning.ring_tokens = ring;
    const Geometry g = make_geometry(shape, 4, 100, resolve_tuning(shape, 4, 100, tuning), 0);
    EXPECT_EQ(g.segments, 1) << ring;
    EXPECT_EQ(g.segment_tokens, 320) << ring;
    EXPECT_EQ(g.max_macrobatches(), 1) << ring;
  }
}

TEST(Planner, ARingThatComesToHoldEverythingByRoundingIsOneSegment) {
  LayerShape shape = small_shape();
  Tuning tuning;
  tuning.ring_tokens = tuning.ring_rows = 1;
  const Tuning resolved = resolve_tuning(shape, 2, 20, tuning);
  EXPECT_EQ(resolved.ring_tokens, 32);
  EXPECT_EQ(resolved.ring_rows, 256);
  EXPECT_EQ(make_geometry(shape, 2, 20, resolved, 0).segments, 1);
}

TEST(Planner, ASmallerRingIsTwoSegmentsOfWholeBlocks) {
  const LayerShape shape = small_shape();
  for (const auto& [asked, used] : {std::pair{1, 64}, {64, 64}, {65, 128}, {200, 256}}) {
    Tuning tuning;
    tuning.ring_tokens = asked;
    const Tuning resolved = resolve_tuning(shape, 4, 100, tuning);
    const Geometry g = make_geometry(shape, 4, 100, resolved, 0);
    EXPECT_EQ(resolved.ring_tokens, used) << asked;
    EXPECT_EQ(g.segments, 2) << asked;
    EXPECT_EQ(g.segment_tokens, used / 2) << asked;
  }
}

TEST(Planner, AMinibatchMayBeLargerThanTheRing) {
  const LayerShape shape = small_shape();
  Tuning tuning;
  tuning.ring_tokens = 1;
  tuning.minibatch_rows = std::int64_t{1} << 40;
  const Tuning resolved = resolve_tuning(shape, 4, 1000, tuning);
  EXPECT_EQ(resolved.ring_tokens, 64);
  EXPECT_GE(resolved.minibatch_rows, 4 * 1000 * shape.topk);
}

TEST(Planner, SavedRowsAreWholeTilesAndAtMostAllRows) {
  const LayerShape shape = small_shape();
  const Tuning tuning = resolve_tuning(shape, 2, 100, {});
  const std::int64_t every_row = make_geometry(shape, 2, 100, tuning, -1).saved_rows;
  EXPECT_EQ(every_row, make_geometry(shape, 2, 100, tuning, -1).max_tiles() * kTileRows);
  for (const auto& [asked, used] :
       {std::pair<std::int64_t, std::int64_t>{0, 0}, {1, 128}, {129, 256}, {1 << 30, every_row}}) {
    EXPECT_EQ(make_geometry(shape, 2, 100, tuning, asked).saved_rows, used) << asked;
  }
}

// ---- Refusals

TEST(Planner, RefusesWhatCannotBeNamingTheValue) {
  const LayerShape shape = small_shape();
  expect_refusal([&] { resolve_tuning(shape, 2, -1, {}); }, {"max_tokens", "-1", "with 2 ranks and"});
  expect_refusal([&] { resolve_tuning(shape, 1, -1, {}); }, {"max_tokens", "-1", "with 1 rank and"});
  expect_refusal([&] { plan::choose_gpu_sms({}, 1, 1); }, {"a rank has 1 SM of its GPU"});
  expect_refusal([&] { resolve_tuning(shape, 0, 8, {}); }, {"ranks", "0"});
  Tuning tuning;
  tuning.comm_sms = 8;
  tuning.sms = 8;
  expect_refusal([&] { resolve_tuning(shape, 2, 8, tuning); }, {"comm_sms", "8"});
  tuning.comm_sms = -3;
  expect_refusal([&] { resolve_tuning(shape, 2, 8, tuning); }, {"comm_sms", "-3"});
}

TEST(Planner, CommunicatingSmsAloneFixNoOthers) {
  Tuning tuning;
  tuning.comm_sms = 20;
  EXPECT_EQ(resolve_tuning(small_shape(), 2, 8, tuning).sms, 21);
}

TEST(Planner, RefusesMoreRoutesThanTheTablesCanNumber) {
  const LayerShape shape = small_shape();
  const auto plan = [&](std::int64_t max_tokens) {
    make_geometry(shape, 8, max_tokens, resolve_tuning(shape, 8, max_tokens, {}), 0);
  };
  EXPECT_NO_THROW(plan(60'000'000));
  expect_refusal([&] { plan(67'108'864); }, {"max_tokens", "67108864", "67108863"});
  for (const std::int64_t tokens : {std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}) {
    expect_refusal([&] { plan(tokens); }, {std::to_string(tokens)});
  }
}

TEST(Planner, TakesTheLargestNumbersForMinibatchAndRing) {
  Tuning tuning;
  tuning.minibatch_rows = tuning.ring_tokens = tuning.ring_rows = std::numeric_limits<std::int64_t>::max();
  const Tuning resolved = resolve_tuning(small_shape(), 2, 100, tuning);
  EXPECT_EQ(resolved.ring_tokens, 128);
  EXPECT_GE(resolved.minibatch_rows, 800);
  EXPECT_EQ(make_geometry(small_shape(), 2, 100, resolved, 0).segments, 1);
}

}  // namespace
}  // namespace moewave::test
