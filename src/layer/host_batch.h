// Checks of a batch that do not need all of it.
#pragma once

#include <cstdint>
#include <vector>

namespace moewave {

/// Throws InputError unless there are 1 to kMaxRanks counts, none negative, whose sum stays within kMaxElements.
void validate_tokens_per_rank(const std::vector<std::int64_t>& tokens_per_rank);

}  // namespace moewave
