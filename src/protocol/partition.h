// Which rank owns which expert: contiguous ranges, the first experts % ranks ranks holding one more.
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

namespace moewave::protocol {

MOEWAVE_HD constexpr std::int32_t first_expert(std::int32_t experts, int ranks, int rank) {
  const std::int32_t more = experts % ranks;
  return rank * (experts / ranks) + (rank < more ? rank : more);
}

MOEWAVE_HD constexpr std::int32_t expert_count(std::int32_t experts, int ranks, int rank) {
  return experts / ranks + (rank < experts % ranks ? 1 : 0);
}

MOEWAVE_HD constexpr std::int32_t max_expert_count(std::int32_t experts, int ranks) {
  return expert_count(experts, ranks, 0);
}

MOEWAVE_HD constexpr int owner_of_expert(std::int32_t experts, int ranks, std::int32_t expert) {
  const std::int32_t base = experts / ranks;
  const std::int32_t more = experts % ranks;
  const std::int32_t in_larger = more * (base + 1);
  return expert < in_larger ? expert / (base + 1) : more + (expert - in_larger) / base;
}

}  // namespace moewave::protocol
