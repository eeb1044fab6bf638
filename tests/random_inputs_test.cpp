// Promises of the random inputs: the same seed gives the same bits on every compiler, and the stated distributions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "moewave/host_layer.h"

namespace moewave {
namespace {

LayerShape shape_of(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts, std::int64_t topk) {
  LayerShape shape;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.experts = experts;
  shape.topk = topk;
  return shape;
}

HostBatch batch_of(const LayerShape& shape, std::vector<std::int64_t> tokens, const std::string& routing,
                   std::uint64_t seed = 7) {
  return random_batch(shape, tokens, routing, seed, true);
}

/// FNV-1a over the bytes.
template <typename T>
std::uint64_t hash(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  std::uint64_t h = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) h = (h ^ bytes[i]) * 0x100000001b3u;
  return h;
}

/// Mean, standard deviation and kurtosis.
struct Moments {
  double mean = 0, deviation = 0, kurtosis = 0;
};

Moments moments(const std::vector<Bf16>& values) {
  const double count = static_cast<double>(values.size());
  double sum = 0, square = 0, fourth = 0;
  for (const Bf16 value : values) {
    const double x = static_cast<double>(to_float(value));
    sum += x;
    square += x * x;
    fourth += x * x * x * x;
  }
  return {sum / count, std::sqrt(square / count), fourth * count / (square * square)};
}

void expect_normal(const std::vector<Bf16>& values, double deviation) {
  const Moments m = moments(values);
  EXPECT_NEAR(m.mean, 0, 0.02 * deviation);
  EXPECT_NEAR(m.deviation, deviation, 0.02 * deviation);
  EXPECT_NEAR(m.kurtosis, 3, 0.3);
}

std::vector<std::int64_t> load(const HostBatch& batch, std::int64_t experts) {
  std::vector<std::int64_t> count(static_cast<std::size_t>(experts), 0);
  for (const std::int32_t id : batch.topk_ids) ++count.at(static_cast<std::size_t>(id));
  return count;
}

void expect_distinct(const HostBatch& batch, std::int64_t topk) {
  for (std::size_t i = 0; i < batch.topk_ids.size(); i += static_cast<std::size_t>(topk)) {
    const std::set<std::int32_t> ids(&batch.topk_ids[i], &batch.topk_ids[i] + topk);
    ASSERT_EQ(static_cast<std::int64_t>(ids.size()), topk) << "route " << i;
  }
}

TEST(RandomInputs, TheBitsOfASeedNeverChange) {
  LayerShape shape = shape_of(64, 32, 8, 3);
  shape.shared_intermediate = 24;
  const HostWeights weights = random_weights(shape, 2026);
  EXPECT_EQ(hash(weights.gate_up), 14711907682357200765u);
  EXPECT_EQ(hash(weights.down), 16805477140099608688u);
  EXPECT_EQ(hash(weights.shared_gate), 10959683861811959957u);
  EXPECT_EQ(hash(weights.shared_up), 12584578309242815772u);
  EXPECT_EQ(hash(weights.shared_down), 5582230144193554937u);
  const HostBatch batch = batch_of(shape, {100, 0, 57}, "zipf:1.1", 2026);
  EXPECT_EQ(hash(batch.hidden_states), 3172259863851207758u);
  EXPECT_EQ(hash(batch.grad_output), 3888823340092849937u);
  EXPECT_EQ(hash(batch.topk_ids), 5278941021291199813u);
  EXPECT_EQ(hash(batch.topk_weights), 16031568509186141284u);
}

TEST(RandomInputs, OtherSeedsAndOtherTensorsDiffer) {
  LayerShape shape = shape_of(64, 64, 1, 1);
  shape.shared_intermediate = 64;
  const HostWeights a = random_weights(shape, 1);
  const HostWeights b = random_weights(shape, 2);
  EXPECT_NE(hash(a.down), hash(b.down));
  EXPECT_NE(hash(a.shared_gate), hash(a.shared_up));
  EXPECT_NE(hash(a.down), hash(a.shared_down));
  const HostBatch batch = batch_of(shape, {64}, "uniform", 1);
  EXPECT_NE(hash(batch.hidden_states), hash(batch.grad_output));
}

TEST(RandomInputs, TokensDoNotDependOnHowTheyAreSplitOverRanks) {
  const LayerShape shape = shape_of(16, 8, 9, 4);
  const HostBatch one = batch_of(shape, {60}, "zipf:1");
  const HostBatch many = batch_of(shape, {0, 50, 1, 9}, "zipf:1");
  EXPECT_EQ(one.hidden_states, many.hidden_states);
  EXPECT_EQ(one.topk_ids, many.topk_ids);
  EXPECT_EQ(one.topk_weights, many.topk_weights);
  EXPECT_EQ(one.grad_output, many.grad_output);
}

TEST(RandomInputs, WeightsAreNormalWithVarianceOneOverFanIn) {
  LayerShape shape = shape_of(128, 64, 8, 1);
  shape.shared_intermediate = 256;
  const HostWeights weights = random_weights(shape, 3);
  EXPECT_NO_THROW(validate(shape, weights));
  expect_normal(weights.gate_up, 1 / std::sqrt(128.0));
  expect_normal(weights.down, 1 / std::sqrt(64.0));
  expect_normal(weights.shared_gate, 1 / std::sqrt(128.0));
  expect_normal(weights.shared_down, 1 / std::sqrt(256.0));
  const HostBatch batch = batch_of(shape, {500, 500}, "uniform");
  EXPECT_NO_THROW(validate(shape, batch, true));
  expect_normal(batch.hidden_states, 1);
  expect_normal(batch.grad_output, 1);
}

TEST(RandomInputs, RouterWeightsArePositiveAndAddUpToOne) {
  for (const std::int64_t topk : {1, 2, 8}) {
    const HostBatch batch = batch_of(shape_of(8, 8, 16, topk), {300}, "uniform");
    for (std::size_t i = 0; i < batch.topk_weights.size(); i += static_cast<std::size_t>(topk)) {
      const float* row = &batch.topk_weights[i];
      EXPECT_GT(*std::min_element(row, row + topk), 0.0f);
      EXPECT_NEAR(std::accumulate(row, row + topk, 0.0), 1.0, 1e-6);
    }
  }
}

TEST(RandomRouting, UniformDrawsDistinctExpertsEvenly) {
  const HostBatch batch = batch_of(shape_of(8, 8, 10, 3), {20000}, "uniform");
  expect_distinct(batch, 3);
  for (const std::int64_t count : load(batch, 10)) EXPECT_NEAR(static_cast<double>(count), 6000, 300);
}

TEST(RandomRouting, ZipfFollowsItsExponentWithExpertsShuffled) {
  const LayerShape shape = shape_of(8, 8, 16, 1);
  std::vector<std::int64_t> count = load(batch_of(shape, {50000}, "zipf:1"), 16);
  EXPECT_FALSE(std::is_sorted(count.rbegin(), count.rend()));
  std::sort(count.rbegin(), count.rend());
  double harmonic = 0;
  for (int rank = 1; rank <= 16; ++rank) harmonic += 1.0 / rank;
  for (int rank = 1; rank <= 8; ++rank) {
    const double wanted = 50000 / harmonic / rank;
    EXPECT_NEAR(static_cast<double>(count[rank - 1]), wanted, 0.06 * wanted) << "rank " << rank;
  }
  const auto busiest = [&](std::uint64_t seed) {
    const std::vector<std::int64_t> loads = load(batch_of(shape, {2000}, "zipf:2", seed), 16);
    return std::max_element(loads.begin(), loads.end()) - loads.begin();
  };
  std::set<std::ptrdiff_t> favourites;
  for (std::uint64_t seed = 0; seed < 20; ++seed) favourites.insert(busiest(seed));
  EXPECT_GT(favourites.size(), 5u);
}

TEST(RandomRouting, ZipfStaysDistinctHoweverSteepAndWithEveryExpertChosen) {
  for (const char* routing : {"zipf:0", "zipf:1.2", "zipf:8", "zipf:1000"}) {
    const HostBatch batch = batch_of(shape_of(8, 8, 64, 64), {50}, routing);
    expect_distinct(batch, 64);
  }
  expect_distinct(batch_of(shape_of(8, 8, 4096, 8), {200}, "zipf:3"), 8);
}

TEST(RandomRouting, SingleSendsTheFirstRouteToOneExpertAndTheRestElsewhere) {
  const HostBatch batch = batch_of(shape_of(8, 8, 6, 3), {4000}, "single:4");
  expect_distinct(batch, 3);
  for (std::size_t i = 0; i < batch.topk_ids.size(); i += 3) ASSERT_EQ(batch.topk_ids[i], 4);
  const std::vector<std::int64_t> count = load(batch, 6);
  for (const std::int64_t expert : {0, 1, 2, 3, 5}) {
    EXPECT_NEAR(static_cast<double>(count[expert]), 1600, 160) << "expert " << expert;
  }
}

TEST(RandomRouting, OneExpertIsAlwaysChosen) {
  for (const char* routing : {"uniform", "zipf:1", "single:0"}) {
    const HostBatch batch = batch_of(shape_of(8, 8, 1, 1), {5}, routing);
    EXPECT_EQ(batch.topk_ids, std::vector<std::int32_t>(5, 0));
  }
}

TEST(RandomRouting, NoTokensGiveEmptyTensors) {
  const HostBatch batch = batch_of(shape_of(8, 8, 4, 2), {0, 0}, "uniform");
  EXPECT_EQ(batch.tokens(), 0);
  EXPECT_TRUE(batch.hidden_states.empty() && batch.topk_ids.empty() && batch.topk_weights.empty());
}

TEST(RandomRouting, WithoutGradOutputThereIsNone) {
  const std::vector<std::int64_t> tokens = {3};
  EXPECT_TRUE(random_batch(shape_of(8, 8, 4, 2), tokens, "uniform", 1, false).grad_output.empty());
}

TEST(RandomRouting, UnknownRoutingIsNamedWithTheAllowedForms) {
  for (const char* routing :
       {"", "Uniform", "uniform ", "zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "zipf:inf", "zipf:1,5", "zipf:1 ",
        "single", "single:", "single:-1", "single:6", "single:2.5", "single:99999999999999999999", "file"}) {
    try {
      batch_of(shape_of(8, 8, 6, 3), {4}, routing);
      ADD_FAILURE() << "accepted '" << routing << "'";
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("'" + std::string(routing) + "'"), std::string::npos) << message;
      for (const char* allowed : {"uniform", "zipf:S", "single:E", "0 to 5"}) {
        EXPECT_NE(message.find(allowed), std::string::npos) << message;
      }
    }
  }
}

TEST(RandomRouting, NegativeTokenCountsAreRefused) {
  EXPECT_THROW(batch_of(shape_of(8, 8, 6, 3), {4, -1}, "uniform"), InputError);
  EXPECT_THROW(batch_of(shape_of(8, 8, 6, 3), {}, "uniform"), InputError);
}

}  // namespace
}  // namespace moewave
