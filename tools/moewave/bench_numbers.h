// What a call costs at least: operations and bytes of each GPU, and the time that they take on a perfect machine.
#pragma once

#include <cstdint>
#include <vector>

#include "moewave/host_layer.h"

namespace moewave::cli {

/// Of one GPU, all its ranks together.
struct GpuWork {
  double flops = 0;     ///< 6 H I for every row, 6 H S for every token with a shared expert; without padding
  double link_in = 0;   ///< bytes from other GPUs: pulled token rows, results pushed by others
  double link_out = 0;  ///< bytes to other GPUs
  /// Bytes of its memory, an estimate: weights of used experts once; token rows written and read when staged, written
  /// into the ring and read by gate-up; h written and read; results written, read by the merge, output written.
  double hbm = 0;
};

/// By device, in the order in which devices appear in `device_of_rank`.
std::vector<GpuWork> work_of_gpus(const LayerShape& shape, const CallReport& report,
                                  const std::vector<int>& device_of_rank);

/// Rates of an H200 that no kernel exceeds: the largest dense BF16 product on random data, the link both ways at once
/// each way, copies in device memory.
inline constexpr double kPeakFlops = 790e12;
inline constexpr double kPeakLink = 330e9;
inline constexpr double kPeakHbm = 4.2e12;

/// The time below which the slowest GPU cannot be, and what sets it.
struct Floor {
  double seconds = 0;
  const char* limit = "";  ///< "compute", "link" or "memory"
};
Floor floor_of(const std::vector<GpuWork>& work);

struct TimeSummary {
  double median = 0;
  double min = 0;
  double max = 0;
};
/// `values` must not be empty.
TimeSummary summary_of(std::vector<double> values);

}  // namespace moewave::cli
