// The forward layer as one launch per rank: from raw ids to merged output.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/sm90/host_words.h"
#include "kernels/sm90/trace.h"
#include "protocol/layout.h"

namespace moewave::sm90 {

/// Weights of one set of experts as tensor maps, BF16, 128-byte swizzle, zeros outside:
///   gate_up  dimensions (H, I, 2, experts), box (64, 128, 2, 1), or (64, 128, 1, 1) where up lies first. The third one
///            has gate and up, whichever lies first; its stride is their distance, which may be any multiple of 16
///            bytes.
///   down     dimensions (I, H, experts), box (64, 256, 1)
struct ExpertMaps {
  CUtensorMap gate_up;
  CUtensorMap down;
  bool gate_lies_first;
};

inline constexpr int kMapBoxColumns = 64;
inline constexpr int kGateBoxRows = 128;
inline constexpr int kDownBoxRows = 256;

/// Arguments of a launch. Pointers are to device memory of the rank's GPU unless said otherwise; the caller's tensors
/// must stay as they are until the launch has ended.
struct ForwardParams {
  ExpertMaps routed;  // of the rank's experts
  ExpertMaps shared;  // one expert; not looked at without a shared expert

  protocol::Layout layout;
  protocol::PointerTable peers;  // the table itself lies in device memory
  void* workspace;               // WorkspaceLayout
  void* context;                 // ContextLayout

  const Bf16* x;         // [tokens, H], 16-byte aligned
  const void* topk_ids;  // [tokens, k] int32, or int64
  bool ids_are_64_bit;
  const float* topk_weights;  // [tokens, k]
  std::int64_t tokens;        // may exceed max_tokens: then all ranks leave the call
  Bf16* output;               // [tokens, H], 16-byte aligned

  float clamp;  // infinity: none
  float shared_clamp;
  int comm_blocks;              // of the grid's blocks, the first; at least 1, fewer than the grid
  std::uint64_t configuration;  // hash of shape and geometry, the same on all ranks

  HostWords* host;  // host memory mapped into the device
  std::uint64_t entry_limit_ns;
  std::uint64_t pipeline_limit_ns;
  std::uint32_t jitter_ns;  // 0: none; test hook: random delays up to this before phases and tasks

  Trace trace;
};

/// Bytes of dynamic shared memory of a block.
std::int64_t forward_shared_bytes();
/// Threads of a block.
int forward_threads();

/// Loads the kernel on the current device and sets its attributes. To be called once a device, before the first launch
/// of any rank: loading may wait for running kernels.
cudaError_t prepare_forward();

/// Enqueues one cooperative launch of `blocks` blocks (at most one an SM) on the current device.
cudaError_t launch_forward(const ForwardParams& params, int blocks, cudaStream_t stream);

}  // namespace moewave::sm90
