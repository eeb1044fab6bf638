#include "layer/element_count.h"

#include <fmt/format.h>

#include "moewave/error.h"

namespace moewave {

std::int64_t element_count(std::string_view tensor, std::initializer_list<std::int64_t> dimensions) {
  for (const std::int64_t dimension : dimensions) {
    if (dimension == 0) return 0;
  }
  std::int64_t count = 1;
  for (const std::int64_t dimension : dimensions) {
    if (count > kMaxElements / dimension) {
      throw InputError(fmt::format("{} of {} elements is too large; at most {} elements are possible", tensor,
                                   join_dimensions(dimensions, " x "), kMaxElements));
    }
    count *= dimension;
  }
  return count;
}

std::string join_dimensions(std::initializer_list<std::int64_t> dimensions, std::string_view separator) {
  std::string text;
  for (const std::int64_t dimension : dimensions) {
    if (!text.empty()) text += separator;
    text += std::to_string(dimension);
  }
  return text;
}

}  // namespace moewave
