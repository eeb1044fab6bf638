// CUDA's error codes as exceptions, the current device, and memory that frees itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "moewave/error.h"

namespace moewave {

/// Throws Error "what: CUDA's text", and leaves no error behind for later calls to find.
inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(what + ": " + cudaGetErrorString(status));
}

/// Makes a device current, and the previous one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

struct CudaFree {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, CudaFree>;

/// Memory of one device. Throws Error that says how much was asked for and how much is free.
inline DeviceMemory allocate_on(int device, std::int64_t bytes, const std::string& what) {
  const DeviceGuard guard(device);
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes > 0 ? bytes : 1));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0;
    std::size_t total = 0;
    cudaMemGetInfo(&free, &total);
    throw Error("out of memory: " + what + " needs " + std::to_string(bytes) + " bytes on device " +
                std::to_string(device) + ", " + std::to_string(free) + " of " + std::to_string(total) + " are free");
  }
  check_cuda(status, "cudaMalloc of " + what);
  return DeviceMemory(memory);
}

}  // namespace moewave
