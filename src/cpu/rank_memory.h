// What one emulated rank owns: its shared memory, workspace and scratch context, and how its calls are described.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "moewave/host_layer.h"
#include "protocol/layout.h"

namespace moewave::cpu {

/// Uninitialised memory, as a GPU allocator gives it. Large blocks cost nothing until they are touched.
class Memory {
 public:
  explicit Memory(std::int64_t bytes = 0)
      : bytes_(bytes), data_(bytes == 0 ? nullptr : std::aligned_alloc(protocol::kAlignment, padded(bytes))) {
    if (bytes != 0 && data_ == nullptr) throw std::bad_alloc();
  }
  Memory(Memory&& other) noexcept : bytes_(other.bytes_), data_(other.data_) {
    other.data_ = nullptr, other.bytes_ = 0;
  }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Memory() { std::free(data_); }

  void* get() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  static std::size_t padded(std::int64_t bytes) {
    return static_cast<std::size_t>(protocol::round_up(bytes, protocol::kAlignment));
  }
  std::int64_t bytes_;
  void* data_;
};

/// A weight gradient's destination: this rank's part of the caller's buffer.
struct GradTarget {
  float* f32 = nullptr;
  Bf16* bf16 = nullptr;
};

/// A kernel's arguments on one rank.
struct RankCall {
  bool backward = false;
  bool absent = false;
  bool disagrees = false;
  bool saves = false;  // forward: pre-activations go to the context
  bool accumulate = false;
  std::int64_t tokens = 0;
  const Bf16* x = nullptr;
  const Bf16* dout = nullptr;
  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;
  const Bf16* gate_up = nullptr;  // of the local experts
  const Bf16* down = nullptr;
  const Bf16* shared_gate = nullptr;
  const Bf16* shared_up = nullptr;
  const Bf16* shared_down = nullptr;
  void* context = nullptr;
  Bf16* output = nullptr;         // out, or dx
  float* grad_weights = nullptr;  // router
  GradTarget grad_gate_up;
  GradTarget grad_down;
  float* shared_grad_gate = nullptr;  // FP32, this rank's share; the host adds the ranks' shares in order
  float* shared_grad_up = nullptr;
  float* shared_grad_down = nullptr;
  RankStats* stats = nullptr;
  CallReport* report = nullptr;
};

struct RankMemory {
  explicit RankMemory(const protocol::Layout& layout)
      : shared(layout.shared.bytes), workspace(layout.workspace.bytes), context(layout.context.bytes) {}

  Memory shared;
  Memory workspace;
  Memory context;              // for calls that keep none
  std::uint32_t launches = 0;  // SMs that have finished calls of this run: stands for the order of launches on a stream
};

}  // namespace moewave::cpu
