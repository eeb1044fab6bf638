// Promises of the host side of the GPU layer that need no GPU: the numbers of tensor maps, the texts of failures, the
// SMs that are chosen.
#include <gtest/gtest.h>

#include "layer/kernel_failure.h"
#include "layer/tensor_map_shape.h"
#include "plan/planner.h"
#include "protocol/entry.h"
#include "support/layer_case.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

// ---- Tensor maps

TEST(TensorMapShape, APackedTensorHasPackedStrides) {
  const TensorMapShape shape = matrix_map_shape(/*columns=*/136, /*rows=*/264, /*experts=*/5, 64, 256);
  EXPECT_EQ(shape.dimensions, 3);
  EXPECT_EQ(std::vector<std::uint64_t>(shape.sizes, shape.sizes + 3), (std::vector<std::uint64_t>{136, 264, 5}));
  EXPECT_EQ(std::vector<std::uint64_t>(shape.strides, shape.strides + 2), (std::vector<std::uint64_t>{272, 264 * 272}));
  EXPECT_EQ(std::vector<std::uint32_t>(shape.box, shape.box + 3), (std::vector<std::uint32_t>{64, 256, 1}));
}

TEST(TensorMapShape, APairLiesAsFarApartAsItIs) {
  const TensorMapShape shape = pair_map_shape(264, 136, 5, /*pair_bytes=*/80'000, /*expert_bytes=*/71'808, 64, 128, 2);
  EXPECT_EQ(shape.dimensions, 4);
  EXPECT_EQ(std::vector<std::uint64_t>(shape.sizes, shape.sizes + 4), (std::vector<std::uint64_t>{264, 136, 2, 5}));
  EXPECT_EQ(std::vector<std::uint64_t>(shape.strides, shape.strides + 3),
            (std::vector<std::uint64_t>{528, 80'000, 71'808}));
  EXPECT_EQ(std::vector<std::uint32_t>(shape.box, shape.box + 4), (std::vector<std::uint32_t>{64, 128, 2, 1}));
  check_map_shape("gate and up", shape);
}

TEST(TensorMapShape, WithoutExpertsTheMapIsOneOfASingleExpert) {
  EXPECT_EQ(matrix_map_shape(8, 8, 0, 64, 256).sizes[2], 1u);
  EXPECT_EQ(pair_map_shape(8, 8, 0, 128, 256, 64, 128, 2).sizes[3], 1u);
}

TEST(TensorMapShape, EveryLegalShapeHasStridesThatTheHardwareTakes) {
  for (const std::int64_t hidden : {8, 16, 264, 7168, 16384}) {
    for (const std::int64_t width : {8, 136, 2048, 32768}) {
      check_map_shape("down", matrix_map_shape(width, hidden, 4096, 64, 256));
      const auto bytes = static_cast<std::uint64_t>(hidden * width * 2);
      check_map_shape("gate and up", pair_map_shape(hidden, width, 4096, bytes, 2 * bytes, 64, 128, 2));
    }
  }
}

TEST(TensorMapShape, WhatTheHardwareCannotTakeIsRefusedByName) {
  EXPECT_NE(refusal([] {
              check_map_shape("down", matrix_map_shape(std::int64_t{1} << 32, 8, 1, 64, 256));
            }).find("down: the size of dimension 0 is 4294967296"),
            std::string::npos);
  EXPECT_NE(refusal([] {
              check_map_shape("gate and up", pair_map_shape(8, 8, 1, 24, 256, 64, 128, 2));
            }).find("dimension 2 is 24 bytes; it must be a multiple of 16"),
            std::string::npos);
  EXPECT_NE(refusal([] {
              check_map_shape("x", pair_map_shape(8, 8, 1, std::uint64_t{1} << 40, 256, 64, 128, 2));
            }).find("must be below"),
            std::string::npos);
  EXPECT_NE(refusal([] { check_address("gate", nullptr); }).find("gate is missing"), std::string::npos);
  EXPECT_NE(
      refusal([] { check_address("gate", reinterpret_cast<const void*>(0x1008)); }).find("gate is at address 4104"),
      std::string::npos);
}

// ---- Failures

sm90::HostWords words_with_route(std::int64_t route) {
  sm90::HostWords words{};
  words.has_bad_route = 1;
  words.bad_route_epoch = 9;
  words.bad_route = route;
  return words;
}

protocol::Geometry small_geometry() {
  const LayerShape shape = make_shape(64, 32, 12, 3);
  return plan::make_geometry(shape, 4, 16, plan::resolve_tuning(shape, 4, 16, {}), 0);
}

TEST(KernelFailure, AWaitThatWasTooLongIsNamedInFull) {
  const sm90::StopRecord stop{2, 17, sm90::Role::kEntry, sm90::Awaited::kIdsFlag, 1, 8, 7, 8};
  const WaitRecord record = wait_record(2, stop);
  EXPECT_EQ(record.rank, 2);
  EXPECT_EQ(record.sm, 17);
  EXPECT_EQ(record.role, "entry");
  EXPECT_EQ(record.waiting_for, "ids of rank[1]");
  EXPECT_EQ(record.wanted, 8u);
  EXPECT_EQ(record.seen, 7u);
  try {
    throw_timeout(record);
  } catch (const TimeoutError& error) {
    EXPECT_STREQ(error.what(), "rank 2, SM 17 (entry) waited too long for ids of rank[1]: wanted 8, saw 7");
    EXPECT_EQ(error.record().rank, 2);
  }
}

TEST(KernelFailure, ARecordOfRubbishIsStillALine) {
  const sm90::StopRecord stop{2, 0, static_cast<sm90::Role>(77), static_cast<sm90::Awaited>(88), 0, 0, 0, 0};
  EXPECT_EQ(wait_record(0, stop).role, "unknown (77)");
}

TEST(KernelFailure, ABadRouteIsNamedByRankTokenAndSlot) {
  const protocol::Geometry geometry = small_geometry();
  throw_bad_route({}, geometry);  // nothing to throw
  EXPECT_EQ(refusal([&] { throw_bad_route(words_with_route((2 * 16 + 5) * 3 + 1), geometry); }),
            "topk_ids of rank 2, token 5, slot 1 is out of range; it must be -1 to 11 (epoch 9)");
}

TEST(KernelFailure, ARefusedCallAndAMismatchAreToldApart) {
  const protocol::Geometry geometry = small_geometry();
  sm90::HostWords words{};
  throw_verdict(words, geometry);  // nothing to throw
  words.has_verdict = 1;
  words.verdict_rank = 3;
  words.verdict_tokens = 17;
  words.verdict_epoch = 4;
  words.verdict = static_cast<std::uint32_t>(protocol::EntryVerdict::kRefused);
  EXPECT_EQ(refusal([&] { throw_verdict(words, geometry); }),
            "rank 3 has 17 tokens; this layer takes at most 16 a rank (epoch 4)");
  words.verdict = static_cast<std::uint32_t>(protocol::EntryVerdict::kMismatch);
  try {
    throw_verdict(words, geometry);
    FAIL() << "accepted a mismatch";
  } catch (const InputError&) {
    FAIL() << "a mismatch is no bad input of this call";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 3 and rank 0 disagree"), std::string::npos) << error.what();
  }
}

// ---- SMs

TEST(GpuSms, AllOfTheGpuAndEightForTheLinkUnlessAskedOtherwise) {
  EXPECT_EQ(plan::choose_gpu_sms({}, 2, 132), (Tuning{.sms = 132, .comm_sms = 8}));
  EXPECT_EQ(plan::choose_gpu_sms({}, 1, 132), (Tuning{.sms = 132, .comm_sms = 1}));
  EXPECT_EQ(plan::choose_gpu_sms({}, 8, 4), (Tuning{.sms = 4, .comm_sms = 3}));
  EXPECT_EQ(plan::choose_gpu_sms({.sms = 20, .comm_sms = 3}, 2, 132), (Tuning{.sms = 20, .comm_sms = 3}));
  EXPECT_EQ(plan::choose_gpu_sms({.minibatch_rows = 5}, 2, 66).minibatch_rows, 5);
}

TEST(GpuSms, MoreThanThereAreIsRefused) {
  EXPECT_NE(refusal([] { plan::choose_gpu_sms({.sms = 67}, 2, 66); }).find("sms is 67"), std::string::npos);
  EXPECT_NE(refusal([] { plan::choose_gpu_sms({}, 2, 1); }).find("a rank has 1"), std::string::npos);
  const LayerShape shape = make_shape(64, 32, 12, 3);
  EXPECT_NE(refusal([&] {
              plan::resolve_tuning(shape, 2, 16, plan::choose_gpu_sms({.comm_sms = 66}, 2, 66));
            }).find("comm_sms is 66"),
            std::string::npos);
}

}  // namespace
}  // namespace moewave::test
