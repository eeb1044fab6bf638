// The sizes of tiles and blocks. Every count of tasks, padded row and counter target follows from these.
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

namespace moewave::protocol {

inline constexpr int kOrderBlockTokens = 32;  // tokens of one rank that stand together in the token order
inline constexpr int kTileRows = 128;         // rows of a tile; an expert's rows are padded to whole tiles
inline constexpr int kGateUpColumns = 128;    // columns of h (128 of gate and 128 of up) that a gate-up task makes
inline constexpr int kDownColumns = 256;      // columns of y that a down task makes: 512 bytes to push a row
inline constexpr int kDhColumns = 256;        // columns of dh that a dh task makes
inline constexpr int kDxColumns = 256;        // columns of dx that a dx task makes
inline constexpr int kWgradHidden = 128;      // a wgrad block is 128 along H (the gathered operand) by 256 along I
inline constexpr int kWgradIntermediate = 256;
inline constexpr int kHiddenSlots = 3;  // minibatches that the ring of h holds

MOEWAVE_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
MOEWAVE_HD constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }
MOEWAVE_HD constexpr std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
MOEWAVE_HD constexpr std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

}  // namespace moewave::protocol
