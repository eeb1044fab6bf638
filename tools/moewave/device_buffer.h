// Tensors in the memory of a GPU, and a timer on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/cuda_check.h"

namespace moewave::cli {

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int device, std::int64_t count, const std::string& name)
      : count_(count), memory_(allocate_on(device, count * static_cast<std::int64_t>(sizeof(T)), name)) {}
  DeviceBuffer(int device, std::span<const T> values, const std::string& name)
      : DeviceBuffer(device, static_cast<std::int64_t>(values.size()), name) {
    if (!values.empty()) {
      check_cuda(cudaMemcpy(get(), values.data(), values.size_bytes(), cudaMemcpyDefault), "upload of " + name);
    }
  }

  T* get() const { return static_cast<T*>(memory_.get()); }
  std::int64_t size() const { return count_; }

  void read(std::span<T> to, std::int64_t first = 0) const {
    if (!to.empty()) check_cuda(cudaMemcpy(to.data(), get() + first, to.size_bytes(), cudaMemcpyDefault), "cudaMemcpy");
  }

 private:
  std::int64_t count_ = 0;
  DeviceMemory memory_;
};

/// Time between two places of a stream, by CUDA events.
class StreamTimer {
 public:
  explicit StreamTimer(int device) : device_(device) {
    const DeviceGuard guard(device_);
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~StreamTimer() {
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  StreamTimer(StreamTimer&& other) noexcept
      : device_(other.device_),
        begin_(std::exchange(other.begin_, nullptr)),
        end_(std::exchange(other.end_, nullptr)) {}
  StreamTimer& operator=(StreamTimer&&) = delete;

  void begin(cudaStream_t stream) { record(begin_, stream); }
  void end(cudaStream_t stream) { record(end_, stream); }

  /// After the stream has passed both places.
  double seconds() const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  void record(cudaEvent_t event, cudaStream_t stream) {
    const DeviceGuard guard(device_);
    check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  }

  int device_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

}  // namespace moewave::cli
