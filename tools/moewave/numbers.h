// Strict parsing of numbers given on the command line: the whole text must be one decimal number inside the allowed
// range. Everything else throws InputError naming the option, the text and what is allowed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moewave::cli {

std::int64_t parse_count(const std::string& option, const std::string& text, std::int64_t min, std::int64_t max);
std::uint64_t parse_seed(const std::string& option, const std::string& text);

/// Counts >= 0 separated by commas.
std::vector<std::int64_t> parse_counts(const std::string& option, const std::string& text);

/// A finite FP32 above zero.
float parse_positive_float(const std::string& option, const std::string& text);

}  // namespace moewave::cli
