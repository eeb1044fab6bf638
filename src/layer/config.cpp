#include "moewave/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "layer/element_count.h"
#include "layer/plural.h"
#include "moewave/error.h"

namespace moewave {
namespace {

void check_width(std::string_view name, std::int64_t value) {
  if (value < kDimensionMultiple || value % kDimensionMultiple != 0) {
    throw InputError(fmt::format("{} is {}; it must be a multiple of {} and at least {}", name, value,
                                 kDimensionMultiple, kDimensionMultiple));
  }
}

void check_clamp(std::string_view name, const std::optional<float>& clamp) {
  if (clamp && !(std::isfinite(*clamp) && *clamp > 0)) {
    throw InputError(fmt::format("{} is {}; it must be finite and greater than 0", name, *clamp));
  }
}

void check_not_negative(std::string_view name, std::int64_t value) {
  if (value < 0) {
    throw InputError(fmt::format("{} is {}; it must be at least 1, or 0 to let the library choose", name, value));
  }
}

}  // namespace

void validate(const LayerShape& shape, int ranks) {
  check_width("hidden", shape.hidden);
  check_width("intermediate", shape.intermediate);
  if (shape.experts < 1 || shape.experts > kMaxExperts) {
    throw InputError(fmt::format("experts is {}; it must be 1 to {}", shape.experts, kMaxExperts));
  }
  const std::int64_t max_topk = std::min(kMaxTopk, shape.experts);
  if (shape.topk < 1 || shape.topk > max_topk) {
    throw InputError(fmt::format("topk is {}; it must be 1 to {}, the lesser of {} and the {}", shape.topk, max_topk,
                                 kMaxTopk, plural(shape.experts, "expert")));
  }
  if (shape.shared_intermediate < 0 || shape.shared_intermediate % kDimensionMultiple != 0) {
    throw InputError(fmt::format("shared_intermediate is {}; it must be 0 (no shared expert) or a multiple of {}",
                                 shape.shared_intermediate, kDimensionMultiple));
  }
  check_clamp("clamp", shape.clamp);
  check_clamp("shared_clamp", shape.shared_clamp);
  if (ranks < 1 || ranks > kMaxRanks) {
    throw InputError(fmt::format("ranks is {}; it must be 1 to {}", ranks, kMaxRanks));
  }
  element_count("gate_up", {shape.experts, 2, shape.intermediate, shape.hidden});
  element_count("shared_gate", {shape.shared_intermediate, shape.hidden});
}

void validate(const Tuning& tuning) {
  check_not_negative("minibatch_rows", tuning.minibatch_rows);
  check_not_negative("ring_tokens", tuning.ring_tokens);
  check_not_negative("ring_rows", tuning.ring_rows);
  check_not_negative("sms", tuning.sms);
  check_not_negative("comm_sms", tuning.comm_sms);
  if (tuning.sms == 1) {
    throw InputError(
        "sms is 1; it must be at least 2 (one communicates, one computes), or 0 to let the library choose");
  }
  if (tuning.sms > 0 && tuning.comm_sms >= tuning.sms) {
    throw InputError(fmt::format("comm_sms is {}; with sms {} it must be 1 to {}, or 0 to let the library choose",
                                 tuning.comm_sms, tuning.sms, tuning.sms - 1));
  }
}

ExpertRange local_experts(std::int64_t experts, int ranks, int rank) {
  const std::int64_t every = experts / ranks;
  const std::int64_t one_more = experts % ranks;
  const std::int64_t begin = rank * every + std::min<std::int64_t>(rank, one_more);
  return {begin, begin + even_share(experts, ranks, rank)};
}

std::int64_t even_share(std::int64_t total, int ranks, int rank) {
  return total / ranks + (rank < total % ranks ? 1 : 0);
}

}  // namespace moewave
