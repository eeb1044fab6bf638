// Sizes of tensors as products of their dimensions, safe against overflow.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace moewave {

/// No tensor may have more elements: 8 bytes for each of them still fit a signed 64-bit offset with room to spare.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;

/// The product of `dimensions`, all >= 0. Throws InputError naming the tensor and its dimensions above kMaxElements.
std::int64_t element_count(std::string_view tensor, std::initializer_list<std::int64_t> dimensions);

/// "4 x 2 x 8" with the separator " x ".
std::string join_dimensions(std::initializer_list<std::int64_t> dimensions, std::string_view separator);

}  // namespace moewave
