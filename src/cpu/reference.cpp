// The layer in FP64 from BF16 inputs, without any intermediate rounding: what every other implementation is measured
// against, so it shares nothing with them but the definition in moewave/config.h.
//
// Experts run one after another. The tokens of an expert are gathered into a matrix, at most kChunkRows at a time, and
// go through plain matrix products. Memory beyond inputs and results is one expert's weights in FP64 and one chunk's
// intermediates.
//
// Deterministic: what runs in parallel is cut into blocks of fixed size that write disjoint results. A token's
// contributions are added in one fixed order: the shared expert, then its routed experts by ascending id.
//
// A row of a product depends on the same row of its left factor only, so a NaN stays within its token until the weight
// gradients sum over tokens.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "layer/parallel_for.h"
#include "moewave/host_layer.h"

namespace moewave {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixMap = Eigen::Map<Matrix>;

constexpr std::int64_t kChunkRows = 1024;
constexpr std::int64_t kBlockRows = 64;  // of one parallel task

/// Calls body(first, count) for blocks of kBlockRows that cover 0..rows-1.
template <typename Body>
void parallel_blocks(std::int64_t rows, const Body& body) {
  parallel_for((rows + kBlockRows - 1) / kBlockRows, [&](std::int64_t block) {
    const std::int64_t first = block * kBlockRows;
    body(first, std::min(kBlockRows, rows - first));
  });
}

void convert_row(const Bf16* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<double>(to_float(from[i]));
}

/// One token at one expert.
struct Route {
  std::int64_t token = 0;
  std::int64_t slot = -1;  // index into topk_weights; -1: the shared expert, whose weight is 1
  double weight = 1;
};

/// Where an expert's weights lie and where their gradients go (null without backward), row-major.
struct Expert {
  std::int64_t width = 0;
  std::optional<float> clamp;
  const Bf16* gate = nullptr;   // [width, hidden]
  const Bf16* up = nullptr;     // [width, hidden]
  const Bf16* down = nullptr;   // [hidden, width]
  double* grad_gate = nullptr;  // likewise
  double* grad_up = nullptr;
  double* grad_down = nullptr;
};

/// h = silu(g) * u with its derivatives by the values before the clamp.
struct SwiGlu {
  double h = 0;
  double by_gate = 0;
  double by_up = 0;
  bool gate_cut = false;  // the clamp acts: nothing flows back on this side, not even a NaN
  bool up_cut = false;
};

SwiGlu swiglu(double gate, double up, const std::optional<float>& clamp) {
  SwiGlu result;
  if (clamp) {
    const double bound = static_cast<double>(*clamp);
    result.gate_cut = gate > bound;
    result.up_cut = std::abs(up) > bound;
    if (result.gate_cut) gate = bound;
    if (result.up_cut) up = std::copysign(bound, up);
  }
  const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
  const double silu = gate * sigmoid;
  result.h = silu * up;
  result.by_gate = up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
  result.by_up = silu;
  return result;
}

/// The weights of the expert at work, in FP64.
struct Weights {
  Matrix gate_up;  // [2 width, hidden], gate rows first
  Matrix down;     // [hidden, width]
};

/// A chunk of one expert's rows and everything computed from them; the lower half only in backward.
struct Chunk {
  std::span<const Route> routes;
  Matrix x;        // [rows, hidden]
  Matrix gate_up;  // [rows, 2 width], before the clamp
  Matrix h;        // [rows, width]
  Matrix y;        // [rows, hidden]

  Matrix grad_output;   // [rows, hidden], not yet multiplied by the router weight
  Matrix weighted_h;    // [rows, width], router weight * h
  Matrix grad_gate_up;  // [rows, 2 width]
  Matrix grad_x;        // [rows, hidden]

  std::int64_t rows() const { return static_cast<std::int64_t>(routes.size()); }
};

class Reference {
 public:
  Reference(const LayerShape& shape, const HostWeights& weights, const HostBatch& batch, bool backward,
            ProgressFunction progress, void* user)
      : shape_(shape), weights_(weights), batch_(batch), backward_(backward), progress_(progress), user_(user) {}

  ReferenceResult run() {
    const std::vector<Route> shared = shared_routes();
    sort_routes();
    total_work_ = static_cast<double>(routes_.size()) * static_cast<double>(shape_.intermediate) +
                  static_cast<double>(shared.size()) * static_cast<double>(shape_.shared_intermediate);
    allocate_results();
    if (!shared.empty()) run_expert(shared_expert(), shared);
    for (std::int64_t e = 0; e < shape_.experts; ++e) {
      const std::span<const Route> routes = std::span(routes_).subspan(begin_[e], begin_[e + 1] - begin_[e]);
      if (!routes.empty()) run_expert(routed_expert(e), routes);
    }
    if (progress_ != nullptr) progress_(1.0, user_);
    return std::move(result_);
  }

 private:
  std::vector<Route> shared_routes() const {
    std::vector<Route> routes;
    if (shape_.shared_intermediate == 0) return routes;
    routes.resize(static_cast<std::size_t>(batch_.tokens()));
    for (std::size_t token = 0; token < routes.size(); ++token) routes[token].token = static_cast<std::int64_t>(token);
    return routes;
  }

  /// Routes by expert, those of an expert by token and slot: begin_[e] is where expert e's start in routes_.
  void sort_routes() {
    begin_.assign(static_cast<std::size_t>(shape_.experts) + 1, 0);
    for (const std::int32_t id : batch_.topk_ids) {
      if (id >= 0) ++begin_[static_cast<std::size_t>(id) + 1];
    }
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    routes_.resize(begin_.back());
    std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
    for (std::size_t slot = 0; slot < batch_.topk_ids.size(); ++slot) {
      const std::int32_t id = batch_.topk_ids[slot];
      if (id < 0) continue;
      const auto index = static_cast<std::int64_t>(slot);
      routes_[next[static_cast<std::size_t>(id)]++] = {index / shape_.topk, index,
                                                       static_cast<double>(batch_.topk_weights[slot])};
    }
  }

  /// Zeros everywhere: the right result of masked routes and of experts without rows.
  void allocate_results() {
    result_.output.assign(batch_.hidden_states.size(), 0.0);
    if (!backward_) return;
    result_.grad_hidden_states.assign(batch_.hidden_states.size(), 0.0);
    result_.grad_topk_weights.assign(batch_.topk_weights.size(), 0.0);
    result_.grad_gate_up.assign(weights_.gate_up.size(), 0.0);
    result_.grad_down.assign(weights_.down.size(), 0.0);
    result_.grad_shared_gate.assign(weights_.shared_gate.size(), 0.0);
    result_.grad_shared_up.assign(weights_.shared_up.size(), 0.0);
    result_.grad_shared_down.assign(weights_.shared_down.size(), 0.0);
  }

  Expert shared_expert() {
    Expert expert;
    expert.width = shape_.shared_intermediate;
    expert.clamp = shape_.shared_clamp;
    expert.gate = weights_.shared_gate.data();
    expert.up = weights_.shared_up.data();
    expert.down = weights_.shared_down.data();
    expert.grad_gate = result_.grad_shared_gate.data();
    expert.grad_up = result_.grad_shared_up.data();
    expert.grad_down = result_.grad_shared_down.data();
    return expert;
  }

  Expert routed_expert(std::int64_t e) {
    const std::int64_t half = shape_.intermediate * shape_.hidden;
    Expert expert;
    expert.width = shape_.intermediate;
    expert.clamp = shape_.clamp;
    expert.gate = weights_.gate_up.data() + e * 2 * half;
    expert.up = expert.gate + half;
    expert.down = weights_.down.data() + e * half;
    if (backward_) {
      expert.grad_gate = result_.grad_gate_up.data() + e * 2 * half;
      expert.grad_up = expert.grad_gate + half;
      expert.grad_down = result_.grad_down.data() + e * half;
    }
    return expert;
  }

  void run_expert(const Expert& expert, std::span<const Route> routes) {
    load_weights(expert);
    while (!routes.empty()) {
      chunk_.routes = routes.first(std::min<std::size_t>(routes.size(), kChunkRows));
      routes = routes.subspan(chunk_.routes.size());
      resize_chunk(expert.width);
      parallel_blocks(chunk_.rows(), [&](std::int64_t first, std::int64_t count) {
        gather(first, count);
        forward(expert, first, count);
        if (backward_) backward(expert, first, count);
      });
      add_to_tokens();
      if (backward_) add_weight_gradients(expert);
      report_progress(expert.width);
    }
  }

  void load_weights(const Expert& expert) {
    const std::int64_t width = expert.width;
    current_.gate_up.resize(2 * width, shape_.hidden);
    current_.down.resize(shape_.hidden, width);
    parallel_blocks(width, [&](std::int64_t first, std::int64_t count) {
      for (std::int64_t i = first; i < first + count; ++i) {
        convert_row(expert.gate + i * shape_.hidden, shape_.hidden, current_.gate_up.row(i).data());
        convert_row(expert.up + i * shape_.hidden, shape_.hidden, current_.gate_up.row(width + i).data());
      }
    });
    parallel_blocks(shape_.hidden, [&](std::int64_t first, std::int64_t count) {
      convert_row(expert.down + first * width, count * width, current_.down.row(first).data());
    });
  }

  void resize_chunk(std::int64_t width) {
    const std::int64_t rows = chunk_.rows();
    chunk_.x.resize(rows, shape_.hidden);
    chunk_.gate_up.resize(rows, 2 * width);
    chunk_.h.resize(rows, width);
    chunk_.y.resize(rows, shape_.hidden);
    if (!backward_) return;
    chunk_.grad_output.resize(rows, shape_.hidden);
    chunk_.weighted_h.resize(rows, width);
    chunk_.grad_gate_up.resize(rows, 2 * width);
    chunk_.grad_x.resize(rows, shape_.hidden);
  }

  void gather(std::int64_t first, std::int64_t count) {
    for (std::int64_t row = first; row < first + count; ++row) {
      const std::int64_t offset = chunk_.routes[row].token * shape_.hidden;
      convert_row(batch_.hidden_states.data() + offset, shape_.hidden, chunk_.x.row(row).data());
      if (backward_) convert_row(batch_.grad_output.data() + offset, shape_.hidden, chunk_.grad_output.row(row).data());
    }
  }

  void forward(const Expert& expert, std::int64_t first, std::int64_t count) {
    chunk_.gate_up.middleRows(first, count).noalias() =
        chunk_.x.middleRows(first, count) * current_.gate_up.transpose();
    for (std::int64_t row = first; row < first + count; ++row) {
      for (std::int64_t i = 0; i < expert.width; ++i) {
        chunk_.h(row, i) = swiglu(chunk_.gate_up(row, i), chunk_.gate_up(row, expert.width + i), expert.clamp).h;
      }
    }
    chunk_.y.middleRows(first, count).noalias() = chunk_.h.middleRows(first, count) * current_.down.transpose();
  }

  void backward(const Expert& expert, std::int64_t first, std::int64_t count) {
    const Matrix grad_h = chunk_.grad_output.middleRows(first, count) * current_.down;
    for (std::int64_t row = first; row < first + count; ++row) {
      const Route& route = chunk_.routes[row];
      double grad_weight = 0;
      for (std::int64_t i = 0; i < expert.width; ++i) {
        const SwiGlu at = swiglu(chunk_.gate_up(row, i), chunk_.gate_up(row, expert.width + i), expert.clamp);
        const double unweighted = grad_h(row - first, i);
        const double weighted = route.weight * unweighted;
        grad_weight += unweighted * at.h;
        chunk_.weighted_h(row, i) = route.weight * at.h;
        chunk_.grad_gate_up(row, i) = at.gate_cut ? 0.0 : weighted * at.by_gate;
        chunk_.grad_gate_up(row, expert.width + i) = at.up_cut ? 0.0 : weighted * at.by_up;
      }
      if (route.slot >= 0) result_.grad_topk_weights[route.slot] = grad_weight;
    }
    chunk_.grad_x.middleRows(first, count).noalias() = chunk_.grad_gate_up.middleRows(first, count) * current_.gate_up;
  }

  /// In one thread, since a token with an id twice has two rows in the chunk.
  void add_to_tokens() {
    MatrixMap output(result_.output.data(), batch_.tokens(), shape_.hidden);
    MatrixMap grad_hidden_states(result_.grad_hidden_states.data(), backward_ ? batch_.tokens() : 0, shape_.hidden);
    for (std::int64_t row = 0; row < chunk_.rows(); ++row) {
      const Route& route = chunk_.routes[row];
      output.row(route.token) += route.weight * chunk_.y.row(row);
      if (backward_) grad_hidden_states.row(route.token) += chunk_.grad_x.row(row);
    }
  }

  void add_weight_gradients(const Expert& expert) {
    MatrixMap grad_gate(expert.grad_gate, expert.width, shape_.hidden);
    MatrixMap grad_up(expert.grad_up, expert.width, shape_.hidden);
    MatrixMap grad_down(expert.grad_down, shape_.hidden, expert.width);
    parallel_blocks(expert.width, [&](std::int64_t first, std::int64_t count) {
      grad_gate.middleRows(first, count).noalias() +=
          chunk_.grad_gate_up.middleCols(first, count).transpose() * chunk_.x;
      grad_up.middleRows(first, count).noalias() +=
          chunk_.grad_gate_up.middleCols(expert.width + first, count).transpose() * chunk_.x;
    });
    parallel_blocks(shape_.hidden, [&](std::int64_t first, std::int64_t count) {
      grad_down.middleRows(first, count).noalias() +=
          chunk_.grad_output.middleCols(first, count).transpose() * chunk_.weighted_h;
    });
  }

  void report_progress(std::int64_t width) {
    done_work_ += static_cast<double>(chunk_.rows()) * static_cast<double>(width);
    if (progress_ != nullptr) progress_(std::min(1.0, done_work_ / total_work_), user_);
  }

  const LayerShape& shape_;
  const HostWeights& weights_;
  const HostBatch& batch_;
  const bool backward_;
  const ProgressFunction progress_;
  void* const user_;

  std::vector<std::size_t> begin_;  // [E + 1]
  std::vector<Route> routes_;
  double total_work_ = 0;  // in rows times width
  double done_work_ = 0;
  Weights current_;
  Chunk chunk_;
  ReferenceResult result_;
};

}  // namespace

ReferenceResult run_reference(const LayerShape& shape, const HostWeights& weights, const HostBatch& batch,
                              bool backward, ProgressFunction progress, void* user) {
  validate(shape, weights);
  validate(shape, batch, backward);
  return Reference(shape, weights, batch, backward, progress, user).run();
}

}  // namespace moewave
