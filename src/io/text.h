// Pieces of error messages. Names come from files that may hold anything, messages are one line.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moewave::io {

/// Control characters become \x0a and the like, so that a message stays one line whatever a name holds.
std::string escape_controls(std::string_view text);

/// 'text' in quotes, control characters escaped, cut after `limit` bytes (never inside a UTF-8 character).
std::string quote(std::string_view text, std::size_t limit = 300);

/// [2, 8, 16]
std::string shape_text(std::span<const std::int64_t> shape);

/// Orders runs of digits by their value: layers.2 before layers.10.
struct NaturalLess {
  using is_transparent = void;
  bool operator()(std::string_view a, std::string_view b) const;
};

}  // namespace moewave::io
