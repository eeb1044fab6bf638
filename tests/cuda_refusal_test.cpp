// Promises of a build with CUDA on a machine without a usable GPU: everything says so in one line.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "moewave/cuda_layer.h"
#include "support/layer_case.h"
#include "support/refusal.h"

namespace moewave::test {
namespace {

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

TEST(CudaWithoutAGpu, IsRefusedInOneLine) {
  if (has_gpu()) GTEST_SKIP() << "there is a GPU";
  EXPECT_NE(refusal([] { in_process(std::vector<int>{0}); }).find("no GPU can be used"), std::string::npos);
  const AdoptedRank rank{0, {reinterpret_cast<void*>(0x1000)}};
  EXPECT_NE(refusal([&] { adopt_memory(std::vector{rank}, 1000, nullptr); }).find("no GPU can be used"),
            std::string::npos);
}

TEST(CudaWithoutAGpu, SharedBytesAreKnown) {
  const LayerShape shape = make_shape(64, 32, 8, 2);
  const std::int64_t small = CudaLayer::shared_bytes(shape, 2, 100);
  // x and slots at least.
  EXPECT_GE(small, 100 * 64 * 2 * (1 + 2));
  EXPECT_GT(CudaLayer::shared_bytes(shape, 2, 1000), small);
  EXPECT_NE(refusal([] { CudaLayer::shared_bytes(make_shape(12, 8, 4, 2), 2, 10); }).find("hidden is 12"),
            std::string::npos);
}

TEST(CudaWithoutRanks, IsRefused) {
  EXPECT_NE(refusal([] { in_process({}); }).find("this process has no ranks"), std::string::npos);
}

}  // namespace
}  // namespace moewave::test
