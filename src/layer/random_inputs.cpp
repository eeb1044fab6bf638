// Random layers and batches.
//
// The bits depend on seed, shape and routing only: not on compiler, standard library, core count, or how the tokens are
// split over ranks (see math/random_values.h).
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <numeric>
#include <string_view>

#include "layer/element_count.h"
#include "layer/host_batch.h"
#include "layer/parallel_for.h"
#include "math/random_values.h"
#include "moewave/host_layer.h"

namespace moewave {
namespace {

using Random = math::RandomValues;
using Stream = math::RandomStream;

std::vector<Bf16> normal_values(std::uint64_t seed, Stream stream, std::int64_t count, double variance) {
  constexpr std::int64_t kBlock = std::int64_t{1} << 16;
  const Random random(seed, stream);
  const float scale = math::normal_scale(variance);
  std::vector<Bf16> values(static_cast<std::size_t>(count));
  parallel_for((count + kBlock - 1) / kBlock, [&](std::int64_t block) {
    const std::int64_t end = std::min(count, (block + 1) * kBlock);
    for (std::int64_t i = block * kBlock; i < end; ++i) {
      values[static_cast<std::size_t>(i)] = random.normal(static_cast<std::uint64_t>(i), scale);
    }
  });
  return values;
}

/// exp(x) for |x| < 10 to about 2e-4, as (1 + x / 2^16)^(2^16). The scaling is exact, products of a value with itself
/// follow, and the last step is a conversion: nothing to fuse, unlike in a polynomial.
float portable_exp(double x) {
  double power = 1.0 + x / 65536.0;
  for (int i = 0; i < 16; ++i) power *= power;
  return static_cast<float>(power);
}

/// Softmax over k logits ~ N(0, 1) for each token.
std::vector<float> router_weights(std::uint64_t seed, std::int64_t tokens, std::int64_t topk) {
  const Random random(seed, Stream::kLogits);
  const double scale = math::normal_integer_scale();
  std::vector<float> weights(static_cast<std::size_t>(tokens * topk));
  for (std::int64_t token = 0; token < tokens; ++token) {
    float* row = weights.data() + token * topk;
    double sum = 0;
    for (std::int64_t j = 0; j < topk; ++j) {
      row[j] = portable_exp(random.normal_integer(static_cast<std::uint64_t>(token * topk + j)) * scale);
      sum += static_cast<double>(row[j]);
    }
    for (std::int64_t j = 0; j < topk; ++j) row[j] = static_cast<float>(static_cast<double>(row[j]) / sum);
  }
  return weights;
}

struct Routing {
  std::vector<std::uint64_t> odds;  // [E], integers > 0: how often each expert is drawn, relative to the others
  std::int64_t first = -1;          // expert of every token's first route; -1: drawn like the others
};

template <typename T>
bool parse_all(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// Odds 2^32 / rank^exponent, at least 1 so that every expert can be drawn; rounded to integers, so that the last bit
/// of std::pow does not matter. Which expert has which rank is shuffled by the seed.
std::vector<std::uint64_t> zipf_odds(std::int64_t experts, double exponent, std::uint64_t seed) {
  const Random random(seed, Stream::kShuffle);
  std::vector<std::uint64_t> odds(static_cast<std::size_t>(experts));
  for (std::size_t i = 0; i < odds.size(); ++i) {
    const double share = std::pow(static_cast<double>(i + 1), -exponent);
    odds[i] = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::round(share * 4294967296.0)));
  }
  for (std::size_t i = odds.size(); i > 1; --i) std::swap(odds[i - 1], odds[random.bits(i) % i]);
  return odds;
}

Routing parse_routing(const std::string& text, std::int64_t experts, std::uint64_t seed) {
  constexpr std::string_view kZipf = "zipf:";
  constexpr std::string_view kSingle = "single:";
  const std::string_view view = text;
  Routing routing;
  routing.odds.assign(static_cast<std::size_t>(experts), 1);
  if (view == "uniform") return routing;
  double exponent = 0;
  if (view.starts_with(kZipf) && parse_all(view.substr(kZipf.size()), exponent) && std::isfinite(exponent) &&
      exponent >= 0) {
    routing.odds = zipf_odds(experts, exponent, seed);
    return routing;
  }
  std::int64_t expert = 0;
  if (view.starts_with(kSingle) && parse_all(view.substr(kSingle.size()), expert) && expert >= 0 && expert < experts) {
    routing.first = expert;
    return routing;
  }
  throw InputError(
      fmt::format("routing is '{}'; it must be uniform, zipf:S with a finite number S >= 0, or single:E with an expert "
                  "E from 0 to {}",
                  text, experts - 1));
}

/// Draws without replacement in O(log E): a Fenwick tree over the odds, from which drawn experts are taken out.
class Urn {
 public:
  explicit Urn(const std::vector<std::uint64_t>& odds) : odds_(odds), tree_(odds.size() + 1) {
    for (std::size_t expert = 0; expert < odds.size(); ++expert) add(expert, odds[expert]);
    total_ = std::accumulate(odds.begin(), odds.end(), std::uint64_t{0});
  }

  /// The bias of the remainder is below 2^-19: the total is at most 4096 * 2^32.
  std::size_t draw(std::uint64_t random_bits) {
    std::uint64_t left = random_bits % total_;
    std::size_t position = 0;
    for (std::size_t step = std::bit_floor(odds_.size()); step > 0; step /= 2) {
      if (position + step < tree_.size() && tree_[position + step] <= left) {
        position += step;
        left -= tree_[position];
      }
    }
    take(position);
    return position;
  }

  void take(std::size_t expert) {
    add(expert, std::uint64_t{0} - odds_[expert]);
    total_ -= odds_[expert];
  }

  void put_back(std::size_t expert) {
    add(expert, odds_[expert]);
    total_ += odds_[expert];
  }

 private:
  void add(std::size_t expert, std::uint64_t amount) {  // wraps, so that a negative amount works
    for (std::size_t i = expert + 1; i < tree_.size(); i += i & (~i + 1)) tree_[i] += amount;
  }

  const std::vector<std::uint64_t>& odds_;
  std::vector<std::uint64_t> tree_;
  std::uint64_t total_ = 0;
};

std::vector<std::int32_t> draw_routes(const Routing& routing, std::uint64_t seed, std::int64_t tokens,
                                      std::int64_t topk) {
  const Random random(seed, Stream::kRoutes);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * topk));
  Urn urn(routing.odds);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int32_t* row = ids.data() + token * topk;
    for (std::int64_t j = 0; j < topk; ++j) {
      if (j == 0 && routing.first >= 0) {
        urn.take(static_cast<std::size_t>(routing.first));
        row[j] = static_cast<std::int32_t>(routing.first);
      } else {
        row[j] = static_cast<std::int32_t>(urn.draw(random.bits(static_cast<std::uint64_t>(token * topk + j))));
      }
    }
    for (std::int64_t j = 0; j < topk; ++j) urn.put_back(static_cast<std::size_t>(row[j]));
  }
  return ids;
}

}  // namespace

HostWeights random_weights(const LayerShape& shape, std::uint64_t seed) {
  validate(shape, /*ranks=*/1);
  const std::int64_t hidden = shape.hidden;
  const std::int64_t width = shape.intermediate;
  const std::int64_t shared = shape.shared_intermediate;
  const double hidden_variance = 1.0 / static_cast<double>(hidden);
  HostWeights weights;
  weights.gate_up = normal_values(seed, Stream::kGateUp, shape.experts * 2 * width * hidden, hidden_variance);
  weights.down = normal_values(seed, Stream::kDown, shape.experts * hidden * width, 1.0 / static_cast<double>(width));
  if (shared > 0) {
    weights.shared_gate = normal_values(seed, Stream::kSharedGate, shared * hidden, hidden_variance);
    weights.shared_up = normal_values(seed, Stream::kSharedUp, shared * hidden, hidden_variance);
    weights.shared_down = normal_values(seed, Stream::kSharedDown, hidden * shared, 1.0 / static_cast<double>(shared));
  }
  return weights;
}

HostBatch random_batch(const LayerShape& shape, std::span<const std::int64_t> tokens_per_rank,
                       const std::string& routing, std::uint64_t seed, bool with_grad_output) {
  validate(shape, /*ranks=*/1);
  HostBatch batch;
  batch.tokens_per_rank.assign(tokens_per_rank.begin(), tokens_per_rank.end());
  validate_tokens_per_rank(batch.tokens_per_rank);
  const Routing parsed = parse_routing(routing, shape.experts, seed);
  const std::int64_t tokens = batch.tokens();
  const std::int64_t values = element_count("hidden_states", {tokens, shape.hidden});
  element_count("topk_ids", {tokens, shape.topk});
  batch.hidden_states = normal_values(seed, Stream::kHiddenStates, values, 1.0);
  batch.topk_ids = draw_routes(parsed, seed, tokens, shape.topk);
  batch.topk_weights = router_weights(seed, tokens, shape.topk);
  if (with_grad_output) batch.grad_output = normal_values(seed, Stream::kGradOutput, values, 1.0);
  return batch;
}

}  // namespace moewave
