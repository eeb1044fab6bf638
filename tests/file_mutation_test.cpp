// The fuzzer's promises over seeded mutations of good files: the same ones every run, with any compiler.
#include <gtest/gtest.h>

#include "fuzz_safetensors.h"
#include "support/file_mutator.h"

namespace moewave::test {
namespace {

TEST(FileMutation, GoodFilesAreAcceptedAsWhatTheyAre) {
  const std::vector<Parts> good = file_seeds();
  EXPECT_TRUE(fuzz_one(raw_file(good[0].header, good[0].data)).weights);
  EXPECT_TRUE(fuzz_one(raw_file(good[1].header, good[1].data)).weights);
  EXPECT_TRUE(fuzz_one(raw_file(good[2].header, good[2].data)).inputs);
  EXPECT_TRUE(fuzz_one(raw_file(good[3].header, good[3].data)).safetensors);
  EXPECT_TRUE(fuzz_one(kIndexSeed).index);
}

TEST(FileMutation, TwentyThousandMutantsAreReadOrRefusedInOneLine) {
  constexpr int kMutants = 20'000;
  const std::vector<Parts> good = file_seeds();
  Mutator mutator(20260801);
  int whole = 0;
  int weights = 0;
  int inputs = 0;
  for (int i = 0; i < kMutants; ++i) {
    const std::string bytes = mutate_file(mutator, good[mutator.below(good.size())], good);
    FuzzOutcome outcome;
    ASSERT_NO_THROW(outcome = fuzz_one(bytes)) << "mutant " << i << " of " << bytes.size() << " bytes:\n"
                                               << testing::PrintToString(bytes);
    whole += outcome.safetensors;
    weights += outcome.weights;
    inputs += outcome.inputs;
  }
  // A mutator that only ever meets the first check would find nothing.
  EXPECT_GT(whole, kMutants / 20);
  EXPECT_LT(whole, kMutants / 2);
  EXPECT_GT(weights, kMutants / 100);
  EXPECT_GT(inputs, kMutants / 100);
}

TEST(FileMutation, MutatedIndexesAreReadOrRefusedInOneLine) {
  constexpr int kMutants = 5'000;
  Mutator mutator(7);
  int accepted = 0;
  for (int i = 0; i < kMutants; ++i) {
    std::string text = kIndexSeed;
    for (std::uint64_t count = 1 + mutator.below(3); count > 0; --count) {
      mutator.below(2) == 0 ? mutator.mutate_bytes(text) : mutator.mutate_json(text);
    }
    FuzzOutcome outcome;
    ASSERT_NO_THROW(outcome = fuzz_one(text)) << "mutant " << i << ": " << testing::PrintToString(text);
    accepted += outcome.index;
  }
  EXPECT_GT(accepted, kMutants / 20);
  EXPECT_LT(accepted, kMutants / 2);
}

}  // namespace
}  // namespace moewave::test
