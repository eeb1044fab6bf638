#include "numbers.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "moewave/error.h"

namespace moewave::cli {

namespace {

template <typename T>
bool parse_all(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end;
}

std::string range_text(std::int64_t min, std::int64_t max) {
  if (max == std::numeric_limits<std::int64_t>::max()) return fmt::format("whole numbers from {}", min);
  return fmt::format("whole numbers from {} to {}", min, max);
}

}  // namespace

std::int64_t parse_count(const std::string& option, const std::string& text, std::int64_t min, std::int64_t max) {
  std::int64_t value = 0;
  if (!parse_all(text, value) || value < min || value > max) {
    throw InputError(fmt::format("{} '{}' is not allowed; allowed are {}", option, text, range_text(min, max)));
  }
  return value;
}

std::uint64_t parse_seed(const std::string& option, const std::string& text) {
  std::uint64_t value = 0;
  if (!parse_all(text, value)) {
    throw InputError(fmt::format("{} '{}' is not allowed; allowed are whole numbers from 0 to {}", option, text,
                                 std::numeric_limits<std::uint64_t>::max()));
  }
  return value;
}

std::vector<std::int64_t> parse_counts(const std::string& option, const std::string& text) {
  std::vector<std::int64_t> values;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = text.find(',', begin);
    const std::string item = text.substr(begin, comma == std::string::npos ? comma : comma - begin);
    std::int64_t value = 0;
    if (!parse_all(item, value) || value < 0) {
      throw InputError(fmt::format("{} '{}' is not allowed; allowed are whole numbers from 0, one or a list T0,T1,...",
                                   option, text));
    }
    values.push_back(value);
    if (comma == std::string::npos) return values;
    begin = comma + 1;
  }
}

float parse_positive_float(const std::string& option, const std::string& text) {
  float value = 0;
  if (!parse_all(text, value) || !std::isfinite(value) || !(value > 0)) {
    throw InputError(fmt::format("{} '{}' is not allowed; allowed are finite numbers above 0", option, text));
  }
  return value;
}

}  // namespace moewave::cli
