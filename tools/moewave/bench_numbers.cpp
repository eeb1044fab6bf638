#include "bench_numbers.h"

#include <algorithm>

namespace moewave::cli {
namespace {

constexpr double kBf16Bytes = 2;

std::vector<int> without_repeats(const std::vector<int>& devices) {
  std::vector<int> result;
  for (const int device : devices) {
    if (std::find(result.begin(), result.end(), device) == result.end()) result.push_back(device);
  }
  return result;
}

double memory_bytes(const LayerShape& shape, const CallReport& report, int ranks, int rank) {
  const RankStats& stats = report.ranks[static_cast<std::size_t>(rank)];
  const auto hidden = static_cast<double>(shape.hidden);
  const auto width = static_cast<double>(shape.intermediate);
  const auto shared = static_cast<double>(shape.shared_intermediate);
  const auto tokens = static_cast<double>(stats.tokens);
  const auto rows = static_cast<double>(stats.rows);
  const auto routes = static_cast<double>(stats.routes);
  const ExpertRange experts = local_experts(shape.experts, ranks, rank);
  double elements = 0;
  for (std::int64_t expert = experts.begin; expert < experts.end; ++expert) {
    if (report.expert_rows[static_cast<std::size_t>(expert)] > 0) elements += 3 * hidden * width;
  }
  elements += 2 * tokens * hidden;                                // staged
  elements += static_cast<double>(stats.pulled_tokens) * hidden;  // into the ring
  elements += rows * hidden + 2 * rows * width;                   // gate-up reads x; h
  elements += 2 * routes * hidden + tokens * hidden;              // results of the rank's routes; output
  if (shared > 0) elements += 3 * hidden * shared + tokens * (hidden + 2 * shared + 2 * hidden);
  return elements * kBf16Bytes;
}

}  // namespace

std::vector<GpuWork> work_of_gpus(const LayerShape& shape, const CallReport& report,
                                  const std::vector<int>& device_of_rank) {
  const std::vector<int> devices = without_repeats(device_of_rank);
  const int ranks = static_cast<int>(device_of_rank.size());
  std::vector<GpuWork> work(devices.size());
  const auto work_of = [&](int rank) -> GpuWork& {
    const int device = device_of_rank[static_cast<std::size_t>(rank)];
    return work[static_cast<std::size_t>(std::find(devices.begin(), devices.end(), device) - devices.begin())];
  };
  for (int rank = 0; rank < ranks; ++rank) {
    const RankStats& stats = report.ranks[static_cast<std::size_t>(rank)];
    GpuWork& own = work_of(rank);
    own.flops += 6 * static_cast<double>(shape.hidden) *
                 (static_cast<double>(stats.rows) * static_cast<double>(shape.intermediate) +
                  static_cast<double>(stats.tokens) * static_cast<double>(shape.shared_intermediate));
    own.hbm += memory_bytes(shape, report, ranks, rank);
    for (int peer = 0; peer < ranks; ++peer) {
      GpuWork& other = work_of(peer);
      if (&other == &own) continue;
      const auto pair =
          static_cast<std::size_t>(rank) * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(peer);
      const auto pulled = static_cast<double>(report.pulled_bytes[pair]);
      const auto pushed = static_cast<double>(report.pushed_bytes[pair]);
      own.link_in += pulled, other.link_out += pulled;
      own.link_out += pushed, other.link_in += pushed;
    }
  }
  return work;
}

Floor floor_of(const std::vector<GpuWork>& work) {
  Floor floor{0, "compute"};
  for (const GpuWork& gpu : work) {
    for (const Floor& one :
         {Floor{gpu.flops / kPeakFlops, "compute"}, Floor{std::max(gpu.link_in, gpu.link_out) / kPeakLink, "link"},
          Floor{gpu.hbm / kPeakHbm, "memory"}}) {
      if (one.seconds > floor.seconds) floor = one;
    }
  }
  return floor;
}

TimeSummary summary_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
  return {median, values.front(), values.back()};
}

}  // namespace moewave::cli
