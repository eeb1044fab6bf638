#include "bench_check.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "layer/parallel_for.h"

namespace moewave::cli {
namespace {

constexpr std::int64_t kSamples = 32;
constexpr double kBound = 5e-3;
constexpr std::int64_t kColumnsAtATime = 32;

struct Sample {
  int rank;
  std::int64_t token;
  std::vector<double> x;
  std::vector<double> sum;
};

// A sample's use of an expert.
struct Use {
  Sample* sample;
  double weight;
};

std::vector<double> widen(const std::vector<Bf16>& values) {
  std::vector<double> wide(values.size());
  std::transform(values.begin(), values.end(), wide.begin(), [](Bf16 v) { return static_cast<double>(to_float(v)); });
  return wide;
}

double dot(const Bf16* a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < b.size(); ++i) sum += static_cast<double>(to_float(a[i])) * b[i];
  return sum;
}

double activation(double gate, double up, const std::optional<float>& clamp) {
  if (clamp) {
    const auto bound = static_cast<double>(*clamp);
    if (gate > bound) gate = bound;
    up = std::isnan(up) ? up : std::clamp(up, -bound, bound);
  }
  return gate / (1 + std::exp(-gate)) * up;
}

// Adds weight * expert(x) to the sum of every use.
void add_expert(const BenchLayer::ExpertWeights& weights, const std::vector<Use>& uses, std::int64_t hidden,
                const std::optional<float>& clamp) {
  const auto width = static_cast<std::int64_t>(weights.down.size()) / hidden;
  std::vector<std::vector<double>> h(uses.size(), std::vector<double>(static_cast<std::size_t>(width)));
  parallel_for((width + kColumnsAtATime - 1) / kColumnsAtATime, [&](std::int64_t block) {
    for (std::int64_t i = block * kColumnsAtATime; i < std::min(width, (block + 1) * kColumnsAtATime); ++i) {
      for (std::size_t use = 0; use < uses.size(); ++use) {
        const double gate = dot(weights.gate_up.data() + i * hidden, uses[use].sample->x);
        const double up = dot(weights.gate_up.data() + (width + i) * hidden, uses[use].sample->x);
        h[use][static_cast<std::size_t>(i)] = activation(gate, up, clamp);
      }
    }
  });
  parallel_for((hidden + kColumnsAtATime - 1) / kColumnsAtATime, [&](std::int64_t block) {
    for (std::int64_t i = block * kColumnsAtATime; i < std::min(hidden, (block + 1) * kColumnsAtATime); ++i) {
      for (std::size_t use = 0; use < uses.size(); ++use) {
        uses[use].sample->sum[static_cast<std::size_t>(i)] +=
            uses[use].weight * dot(weights.down.data() + i * width, h[use]);
      }
    }
  });
}

std::vector<Sample> choose_samples(const BenchLayer& bench) {
  const std::vector<std::int64_t>& tokens = bench.routes().tokens_per_rank;
  const auto ranks = static_cast<std::int64_t>(tokens.size());
  const std::int64_t each = std::max<std::int64_t>(1, kSamples / ranks);
  std::vector<Sample> samples;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    const std::int64_t count = std::min(each, tokens[rank]);
    for (std::int64_t i = 0; i < count; ++i) {
      // From the first token to the last.
      const std::int64_t token = count == 1 ? 0 : i * (tokens[rank] - 1) / (count - 1);
      Sample sample{static_cast<int>(rank), token, widen(bench.x_row(static_cast<int>(rank), token)), {}};
      sample.sum.assign(static_cast<std::size_t>(bench.shape().hidden), 0.0);
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

// The few numbers of a narrow row may all happen to be sums that cancel.
double bound_of_row(std::int64_t hidden) { return kBound * (hidden < 64 ? 4.0 : hidden < 4096 ? 1.5 : 1.0); }

}  // namespace

SampleCheck check_samples(const BenchLayer& bench) {
  const LayerShape& shape = bench.shape();
  std::vector<Sample> samples = choose_samples(bench);
  std::map<std::int64_t, std::vector<Use>> uses;
  for (Sample& sample : samples) {
    std::int64_t row = sample.token;
    for (int rank = 0; rank < sample.rank; ++rank)
      row += bench.routes().tokens_per_rank[static_cast<std::size_t>(rank)];
    for (std::int64_t slot = 0; slot < shape.topk; ++slot) {
      const auto route = static_cast<std::size_t>(row * shape.topk + slot);
      const std::int32_t id = bench.routes().topk_ids[route];
      if (id >= 0) uses[id].push_back({&sample, static_cast<double>(bench.routes().topk_weights[route])});
    }
  }
  for (const auto& [expert, of_expert] : uses) add_expert(bench.expert(expert), of_expert, shape.hidden, shape.clamp);
  if (shape.shared_intermediate > 0) {
    std::vector<Use> all;
    for (Sample& sample : samples) all.push_back({&sample, 1.0});
    add_expert(bench.shared_expert(), all, shape.hidden, shape.shared_clamp);
  }

  SampleCheck check;
  check.bound = bound_of_row(shape.hidden);
  double squares = 0;
  double reference_squares = 0;
  for (const Sample& sample : samples) {
    const std::vector<double> output = widen(bench.output_row(sample.rank, sample.token));
    double row_squares = 0;
    double row_reference = 0;
    for (std::size_t i = 0; i < output.size(); ++i) {
      row_squares += (output[i] - sample.sum[i]) * (output[i] - sample.sum[i]);
      row_reference += sample.sum[i] * sample.sum[i];
    }
    ++check.rows;
    const bool ok = row_squares == 0 || std::sqrt(row_squares / row_reference) <= check.bound;  // false for NaN
    if (!ok) ++check.wrong;
    squares += row_squares;
    reference_squares += row_reference;
  }
  check.relative_error = squares == 0 ? 0 : std::sqrt(squares / reference_squares);
  return check;
}

}  // namespace moewave::cli
