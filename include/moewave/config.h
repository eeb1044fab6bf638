// Shape, tuning and limits of a Mixture-of-Experts layer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace moewave {

/// What the layer computes. For token x with routes (e_j, w_j), j = 0..topk-1:
///   g_j = bf16(x Wg[e_j]^T)   u_j = bf16(x Wu[e_j]^T)   h_j = bf16(silu(g_j) * u_j)   y_j = bf16(h_j Wd[e_j]^T)
///   out = bf16(fp32(y_shared) + sum_j w_j * fp32(y_j)), summed in the order of j by fused multiply-add.
/// With a clamp c: g = min(g, c), u = clip(u, -c, c) before h is formed; NaN passes through.
struct LayerShape {
  std::int64_t hidden = 0;               ///< H, a multiple of 8
  std::int64_t intermediate = 0;         ///< I, a multiple of 8
  std::int64_t experts = 0;              ///< E, all ranks together, 1 to 4096
  std::int64_t topk = 0;                 ///< k, routes a token, 1 to min(64, E)
  std::int64_t shared_intermediate = 0;  ///< S, width of the shared expert, a multiple of 8; 0: none
  std::optional<float> clamp;            ///< of the routed experts, finite and > 0
  std::optional<float> shared_clamp;     ///< of the shared expert, finite and > 0

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

inline constexpr std::int64_t kMaxExperts = 4096;
inline constexpr std::int64_t kMaxTopk = 64;
inline constexpr std::int64_t kDimensionMultiple = 8;
inline constexpr int kMaxRanks = 1024;

/// How the work is cut. No choice changes `output`, `grad_hidden_states` or `grad_topk_weights` by a bit. Zero: chosen
/// by the library from shape, ranks and SMs.
struct Tuning {
  std::int64_t minibatch_rows = 0;  ///< rows handed to compute at a time; rounded up to whole tiles
  std::int64_t ring_tokens = 0;     ///< token copies a rank can hold; rounded up to two segments of whole order blocks
  std::int64_t ring_rows = 0;       ///< rows of one macrobatch whose backward intermediates a rank can hold; rounded up
  int sms = 0;                      ///< streaming multiprocessors a rank takes (emulator: threads)
  int comm_sms = 0;                 ///< how many of them communicate, 1 <= comm_sms < sms

  friend bool operator==(const Tuning&, const Tuning&) = default;
};

/// Throws InputError naming the first value that is not allowed and the allowed set.
void validate(const LayerShape& shape, int ranks);
/// Likewise for the tuning; negative values are refused, zeros are left to the library.
void validate(const Tuning& tuning);

/// Experts lie in contiguous ranges; the first experts % ranks ranks hold one more.
struct ExpertRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};
ExpertRange local_experts(std::int64_t experts, int ranks, int rank);

/// Splits `total` tokens over `ranks` as evenly as possible, the first ranks taking the remainder.
std::int64_t even_share(std::int64_t total, int ranks, int rank);

}  // namespace moewave
