// Text for people: units, thousands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moewave::cli {

std::string human_count(std::int64_t value);                    ///< 1234567 -> "1,234,567"
std::string human_bytes(std::int64_t bytes);                    ///< "512 B", "1.50 KiB", "23.4 MiB"
std::string human_seconds(double seconds);                      ///< "12.3 us", "4.56 ms", "1.20 s"
std::string human_error(double error);                          ///< "1.23e-03", "0", "nan"
std::string plural(std::int64_t count, std::string_view noun);  ///< "1 rank", "4 ranks"

}  // namespace moewave::cli
