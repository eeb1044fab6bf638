// Numbers of things in messages.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace moewave {

/// "1 rank", "4 ranks"
std::string plural(std::integral auto count, std::string_view noun) {
  return std::to_string(count) + " " + std::string(noun) + (count == 1 ? "" : "s");
}

}  // namespace moewave
