// Inputs of a layer for tests: shape, weights and batch together, and the ways tests bend them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "moewave/host_layer.h"

namespace moewave::test {

using Tokens = std::vector<std::int64_t>;  // of each rank

struct LayerCase {
  LayerShape shape;
  HostWeights weights;
  HostBatch batch;

  int ranks() const { return static_cast<int>(batch.tokens_per_rank.size()); }
  std::int64_t max_tokens() const {
    return *std::max_element(batch.tokens_per_rank.begin(), batch.tokens_per_rank.end());
  }
};

inline LayerShape make_shape(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts, std::int64_t topk,
                             std::int64_t shared_intermediate = 0) {
  LayerShape shape;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.experts = experts;
  shape.topk = topk;
  shape.shared_intermediate = shared_intermediate;
  return shape;
}

inline LayerCase random_case(const LayerShape& shape, const Tokens& tokens, std::uint64_t seed,
                             const std::string& routing = "uniform") {
  return {shape, random_weights(shape, seed), random_batch(shape, tokens, routing, seed + 1, true)};
}

/// All experts compute the same function times (e + 1), so that a row that met a wrong expert stands out by itself.
inline HostWeights marker_weights(const LayerShape& shape, std::uint64_t seed) {
  HostWeights weights = random_weights(shape, seed);
  const std::size_t size = static_cast<std::size_t>(shape.hidden * shape.intermediate);
  for (std::size_t e = 0; e < static_cast<std::size_t>(shape.experts); ++e) {
    std::copy_n(weights.gate_up.begin(), 2 * size, weights.gate_up.begin() + static_cast<std::ptrdiff_t>(e * 2 * size));
    for (std::size_t i = 0; i < size; ++i) {
      weights.down[e * size + i] = to_bf16(static_cast<float>(e + 1) * to_float(weights.down[i]));
    }
  }
  return weights;
}

inline LayerCase marked_case(const LayerShape& shape, const Tokens& tokens, std::uint64_t seed,
                             const std::string& routing = "uniform") {
  return {shape, marker_weights(shape, seed), random_batch(shape, tokens, routing, seed + 1, true)};
}

/// Replaces every id by expert_of(token, slot), the tokens being counted over all ranks.
template <typename ExpertOf>
void route(LayerCase& layer_case, ExpertOf&& expert_of) {
  const std::int64_t topk = layer_case.shape.topk;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(layer_case.batch.topk_ids.size()); ++i) {
    layer_case.batch.topk_ids[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(expert_of(i / topk, i % topk));
  }
}

/// Token t's j-th route goes to the j-th of `topk` consecutive experts of [begin, end), starting at t.
inline void route_within(LayerCase& layer_case, std::int64_t begin, std::int64_t end) {
  route(layer_case, [=](std::int64_t token, std::int64_t slot) { return begin + (token + slot) % (end - begin); });
}

/// Masks about `percent` of the routes.
inline void mask_routes(LayerCase& layer_case, std::uint32_t percent, std::uint32_t seed) {
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::int32_t& id : layer_case.batch.topk_ids) {
    state = state * 1664525u + 1013904223u;
    if ((state >> 16) % 100 < percent) id = -1;
  }
}

/// The same tokens, split over ranks in another way.
inline LayerCase split(LayerCase layer_case, const Tokens& tokens) {
  layer_case.batch.tokens_per_rank = tokens;
  return layer_case;
}

inline Tokens even_split(std::int64_t total, int ranks) {
  Tokens tokens;
  for (int rank = 0; rank < ranks; ++rank) tokens.push_back(even_share(total, ranks, rank));
  return tokens;
}

/// One token's row of a tensor that is `width` wide.
template <typename T>
std::vector<T> row_of(const std::vector<T>& tensor, std::int64_t row, std::int64_t width) {
  return {tensor.begin() + row * width, tensor.begin() + (row + 1) * width};
}

}  // namespace moewave::test
