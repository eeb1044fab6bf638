// What a caller hands over is checked here once, so that the reference and the emulator may index without checks.
#include "layer/host_batch.h"

#include <fmt/format.h>

#include <initializer_list>
#include <string_view>

#include "layer/element_count.h"
#include "layer/plural.h"
#include "moewave/host_layer.h"

namespace moewave {
namespace {

template <typename T>
void check_size(std::string_view tensor, const std::vector<T>& values, std::string_view layout,
                std::initializer_list<std::int64_t> dimensions) {
  const std::int64_t wanted = element_count(tensor, dimensions);
  if (static_cast<std::int64_t>(values.size()) != wanted) {
    throw InputError(fmt::format("{} has {}; {} = [{}] needs {}", tensor, plural(values.size(), "element"), layout,
                                 join_dimensions(dimensions, ", "), wanted));
  }
}

void check_ids(const LayerShape& shape, const HostBatch& batch) {
  std::size_t i = 0;
  for (std::size_t rank = 0; rank < batch.tokens_per_rank.size(); ++rank) {
    for (std::int64_t token = 0; token < batch.tokens_per_rank[rank]; ++token) {
      for (std::int64_t slot = 0; slot < shape.topk; ++slot, ++i) {
        const std::int32_t id = batch.topk_ids[i];
        if (id >= -1 && id < shape.experts) continue;
        throw InputError(fmt::format("topk_ids at rank {}, token {}, slot {} is {}; it must be -1 to {}", rank, token,
                                     slot, id, shape.experts - 1));
      }
    }
  }
}

}  // namespace

void validate_tokens_per_rank(const std::vector<std::int64_t>& tokens_per_rank) {
  if (tokens_per_rank.empty() || tokens_per_rank.size() > static_cast<std::size_t>(kMaxRanks)) {
    throw InputError(fmt::format("tokens_per_rank names {}; it must name 1 to {}",
                                 plural(tokens_per_rank.size(), "rank"), kMaxRanks));
  }
  std::int64_t left = kMaxElements;
  for (std::size_t rank = 0; rank < tokens_per_rank.size(); ++rank) {
    const std::int64_t tokens = tokens_per_rank[rank];
    if (tokens < 0 || tokens > left) {
      throw InputError(
          fmt::format("tokens_per_rank of rank {} is {}; it must be 0 or more, and at most {} over all ranks", rank,
                      tokens, kMaxElements));
    }
    left -= tokens;
  }
}

std::int64_t HostBatch::tokens() const {
  std::int64_t sum = 0;
  for (const std::int64_t tokens : tokens_per_rank) sum += tokens;
  return sum;
}

void validate(const LayerShape& shape, const HostWeights& weights) {
  validate(shape, /*ranks=*/1);
  check_size("gate_up", weights.gate_up, "[experts, 2, intermediate, hidden]",
             {shape.experts, 2, shape.intermediate, shape.hidden});
  check_size("down", weights.down, "[experts, hidden, intermediate]",
             {shape.experts, shape.hidden, shape.intermediate});
  const std::int64_t shared = shape.shared_intermediate;
  check_size("shared_gate", weights.shared_gate, "[shared_intermediate, hidden]", {shared, shape.hidden});
  check_size("shared_up", weights.shared_up, "[shared_intermediate, hidden]", {shared, shape.hidden});
  check_size("shared_down", weights.shared_down, "[hidden, shared_intermediate]", {shape.hidden, shared});
}

void validate(const LayerShape& shape, const HostBatch& batch, bool backward) {
  validate(shape, /*ranks=*/1);
  validate_tokens_per_rank(batch.tokens_per_rank);
  const std::int64_t tokens = batch.tokens();
  check_size("hidden_states", batch.hidden_states, "[tokens, hidden]", {tokens, shape.hidden});
  check_size("topk_ids", batch.topk_ids, "[tokens, topk]", {tokens, shape.topk});
  check_size("topk_weights", batch.topk_weights, "[tokens, topk]", {tokens, shape.topk});
  if (backward && batch.grad_output.empty() && tokens > 0) {
    throw InputError(
        fmt::format("grad_output is missing; backward needs [tokens, hidden] = [{}, {}]", tokens, shape.hidden));
  }
  if (!batch.grad_output.empty()) {
    check_size("grad_output", batch.grad_output, "[tokens, hidden]", {tokens, shape.hidden});
  }
  check_ids(shape, batch);
}

}  // namespace moewave
