// One run of a problem on a backend.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moewave/host_layer.h"
#include "options.h"
#include "problem.h"

namespace moewave::cli {

struct RunResult {
  std::vector<Bf16> output;                ///< [N, H]
  std::optional<HostGradients> gradients;  ///< with --backward
  double seconds = 0;                      ///< wall time of all calls on this CPU

  // Of the emulator and of GPUs only.
  std::optional<Tuning> tuning;      ///< in use, rounded
  std::int64_t workspace_bytes = 0;  ///< of one rank
  std::int64_t saved_bytes = 0;      ///< saved for backward, all ranks
  std::vector<CallReport> calls;     ///< forward, and backward if there is one
  std::vector<TimelineEvent> timeline;
};

RunResult run_emulator(const Problem& problem, const RunOptions& options);

/// The FP64 results with a progress line.
ReferenceResult reference_with_progress(const Problem& problem, bool backward);

/// The FP64 results rounded to the types of the output file.
RunResult rounded(const ReferenceResult& reference, bool backward);

}  // namespace moewave::cli
