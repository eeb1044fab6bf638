#include "compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace moewave::cli {

namespace {

constexpr double kActivationBound = 5e-3;
constexpr double kGradientBound = 1e-2;
constexpr double kLargestBf16 = 3.3895313892515355e38;
constexpr double kSmallestNormal = std::numeric_limits<float>::min();

double value_of(Bf16 value) { return static_cast<double>(to_float(value)); }
double value_of(float value) { return static_cast<double>(value); }

// True where the reference itself is no finite number of the result's type and the result says the same.
bool same_non_finite(double value, double reference) {
  if (std::isnan(reference)) return std::isnan(value);
  return std::isinf(value) && std::abs(reference) > kLargestBf16 && std::signbit(value) == std::signbit(reference);
}

double difference(double value, double reference) {
  const double distance = std::abs(value - reference);
  const bool below_range = reference != 0 && std::abs(reference) < kSmallestNormal;
  return below_range && distance < kSmallestNormal ? 0 : distance;
}

template <typename T>
Check compare_tensor(const std::string& name, std::span<const T> values, std::span<const double> reference,
                     double bound) {
  Check check{.tensor = name, .elements = static_cast<std::int64_t>(reference.size()), .bound = bound};
  if (values.size() != reference.size()) {
    throw Error(name + " has " + std::to_string(values.size()) + " elements, the reference " +
                std::to_string(reference.size()));
  }
  double squares = 0;
  double reference_squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = value_of(values[i]);
    if (same_non_finite(value, reference[i])) continue;
    if (!std::isfinite(value) || !std::isfinite(reference[i])) {
      ++check.misplaced;
      continue;
    }
    const double distance = difference(value, reference[i]);
    check.max_abs_error = std::max(check.max_abs_error, distance);
    squares += distance * distance;
    reference_squares += reference[i] * reference[i];
  }
  check.relative_error = squares == 0 ? 0 : std::sqrt(squares) / std::sqrt(reference_squares);
  if (check.misplaced > 0) {
    check.max_abs_error = check.relative_error = std::numeric_limits<double>::quiet_NaN();
  }
  return check;
}

}  // namespace

std::vector<Check> compare(const Problem& problem, const RunResult& result, const ReferenceResult& reference) {
  std::vector<Check> checks;
  const auto add = [&](const char* name, const auto& values, const std::vector<double>& expected, double bound) {
    checks.push_back(compare_tensor(name, std::span(values), std::span(expected), bound));
  };
  add("output", result.output, reference.output, kActivationBound);
  if (!result.gradients) return checks;
  const HostGradients& gradients = *result.gradients;
  add("grad_hidden_states", gradients.hidden_states, reference.grad_hidden_states, kActivationBound);
  add("grad_topk_weights", gradients.topk_weights, reference.grad_topk_weights, kGradientBound);
  add("grad_gate_up_proj", gradients.gate_up.f32, reference.grad_gate_up, kGradientBound);
  add("grad_down_proj", gradients.down.f32, reference.grad_down, kGradientBound);
  if (problem.shape.shared_intermediate == 0) return checks;
  add("grad_shared_gate_proj", gradients.shared_gate.f32, reference.grad_shared_gate, kGradientBound);
  add("grad_shared_up_proj", gradients.shared_up.f32, reference.grad_shared_up, kGradientBound);
  add("grad_shared_down_proj", gradients.shared_down.f32, reference.grad_shared_down, kGradientBound);
  return checks;
}

std::vector<double> output_error_by_rank(const Problem& problem, const RunResult& result,
                                         const ReferenceResult& reference) {
  std::vector<double> errors;
  std::size_t begin = 0;
  for (const std::int64_t tokens : problem.batch.tokens_per_rank) {
    const auto count = static_cast<std::size_t>(tokens * problem.shape.hidden);
    errors.push_back(compare_tensor("output", std::span(result.output).subspan(begin, count),
                                    std::span(reference.output).subspan(begin, count), kActivationBound)
                         .relative_error);
    begin += count;
  }
  return errors;
}

}  // namespace moewave::cli
