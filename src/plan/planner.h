// Chooses what the caller left open and turns shape and tuning into the geometry that all sizes follow from.
#pragma once

#include <cstdint>

#include "moewave/config.h"
#include "protocol/geometry.h"

namespace moewave::plan {

inline constexpr int kEmulatorSms = 8;

/// Rows that keep `sms` SMs busy for two waves when a row tile of `tile_rows` rows makes `tasks_per_tile` tasks: fewer
/// rows leave SMs idle at the end of every minibatch, many more delay the first combine.
std::int64_t two_wave_rows(std::int64_t sms, std::int64_t tile_rows, std::int64_t tasks_per_tile);

/// Of a GPU rank. Measured on two H200: bulk copies of 12 SMs fill the link one way; pulls share it with pushes, and
/// SMs that have no pulls left compute.
inline constexpr int kGpuCommSms = 8;

/// Fills in the SMs that were left open for a rank that has `available` SMs of a GPU to itself; the result goes to
/// resolve_tuning. Throws InputError when more were asked for or `available` is below 2.
Tuning choose_gpu_sms(const Tuning& tuning, int ranks, int available);

/// Fills in every zero of `tuning` and rounds the rest; the result is what runs. `max_tokens`: of one rank.
/// Throws InputError for what cannot be.
Tuning resolve_tuning(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning);

/// `tuning` comes from resolve_tuning. `saved_rows` as in EmulatorOptions. Throws InputError when a count would not fit
/// the 32-bit numbers of the tables.
protocol::Geometry make_geometry(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning,
                                 std::int64_t saved_rows);

}  // namespace moewave::plan
