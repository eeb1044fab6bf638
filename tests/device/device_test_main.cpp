// GoogleTest's main for programs that need a Hopper GPU: without one they say so and end with 77, which CTest lists as
// not run.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int kNotRun = 77;

// Why this machine cannot run the tests, empty if it can.
std::string obstacle() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) return std::string("no GPU (") + cudaGetErrorString(status) + ")";
  for (int device = 0; device < devices; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "the properties of a GPU cannot be read";
    if (properties.major != 9 || properties.minor != 0) {
      return "GPU " + std::to_string(device) + " has compute capability " + std::to_string(properties.major) + "." +
             std::to_string(properties.minor) + "; these tests are built for 9.0 alone";
    }
    std::printf("GPU %d: %s, %d SMs\n", device, properties.name, properties.multiProcessorCount);
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // before CUDA starts: ranks that share a GPU need a queue each
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  const std::string why_not = obstacle();
  if (!why_not.empty()) {
    std::printf("NOT RUN: %s. NOTHING WAS TESTED.\n", why_not.c_str());
    return kNotRun;
  }
  return RUN_ALL_TESTS();
}
