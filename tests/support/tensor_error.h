// How far a tensor is from what it should be: over the whole tensor, and in its worst row, so that one wrong row among
// thousands shows.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "moewave/bf16.h"

namespace moewave::test {

inline std::vector<double> widen(const std::vector<Bf16>& values) {
  std::vector<double> result;
  result.reserve(values.size());
  for (const Bf16 value : values) result.push_back(static_cast<double>(to_float(value)));
  return result;
}
inline std::vector<double> widen(const std::vector<float>& values) { return {values.begin(), values.end()}; }

struct TensorError {
  double frobenius = 0;  // relative to the tensor's norm
  double worst_row = 0;  // relative to the row's norm, but at least to three tenths of the mean row's
  std::size_t row = 0;   // the worst
};

/// NaN anywhere, or a value where all should be zero, makes an error of infinity.
inline TensorError measure(const std::vector<double>& got, const std::vector<double>& wanted, std::size_t width) {
  TensorError error;
  const std::size_t rows = width == 0 ? 0 : wanted.size() / width;
  std::vector<double> wanted_squares(rows, 0.0);
  std::vector<double> error_squares(rows, 0.0);
  double wanted_sum = 0;
  double error_sum = 0;
  for (std::size_t i = 0; i < rows * width; ++i) {
    const double difference = got[i] - wanted[i];
    wanted_squares[i / width] += wanted[i] * wanted[i];
    error_squares[i / width] += difference * difference;
  }
  for (std::size_t row = 0; row < rows; ++row) wanted_sum += wanted_squares[row], error_sum += error_squares[row];
  const auto ratio = [](double part, double whole) {
    if (part == 0) return 0.0;
    return std::isfinite(part) && whole > 0 ? std::sqrt(part / whole) : std::numeric_limits<double>::infinity();
  };
  error.frobenius = ratio(error_sum, wanted_sum);
  const double floor = rows == 0 ? 0.0 : wanted_sum / static_cast<double>(rows) * 0.09;
  for (std::size_t row = 0; row < rows; ++row) {
    const double of_row = ratio(error_squares[row], std::max(wanted_squares[row], floor));
    if (of_row > error.worst_row) error.worst_row = of_row, error.row = row;
  }
  return error;
}

/// The room that few numbers need above a bound for many: they may all happen to be sums that cancel.
inline double room_for(std::size_t elements) { return elements < 64 ? 4.0 : (elements < 4096 ? 1.5 : 1.0); }

/// `bound` is that of the relative Frobenius error; a single row may be off by ten times as much.
inline void expect_close(const std::string& name, const std::vector<double>& got, const std::vector<double>& wanted,
                         std::int64_t width, double bound) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  const TensorError error = measure(got, wanted, static_cast<std::size_t>(width));
  const double room = room_for(wanted.size());
  EXPECT_LT(error.frobenius, room * bound) << name;
  EXPECT_LT(error.worst_row, room * 10 * bound) << name << ", row " << error.row;
}

/// Equality of bits, so that -0 and 0 differ and NaN equals itself.
template <typename T>
void expect_same_bits(const std::string& name, const std::vector<T>& got, const std::vector<T>& wanted) {
  ASSERT_EQ(got.size(), wanted.size()) << name;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &wanted[i], sizeof(T)) == 0) continue;
    ADD_FAILURE() << name << " differs first at element " << i << " of " << got.size() << ": " << widen(got)[i]
                  << " instead of " << widen(wanted)[i];
    return;
  }
}

/// Every element in [begin, end) is exactly zero.
template <typename T>
void expect_zeros(const std::string& name, const std::vector<T>& values, std::int64_t begin, std::int64_t end) {
  ASSERT_LE(static_cast<std::size_t>(end), values.size()) << name;
  const std::vector<double> wide = widen(std::vector<T>(values.begin() + begin, values.begin() + end));
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (wide[i] == 0) continue;
    ADD_FAILURE() << name << " is " << wide[i] << " at element " << begin + static_cast<std::int64_t>(i)
                  << "; all should be zero";
    return;
  }
}

}  // namespace moewave::test
