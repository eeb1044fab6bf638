// The layer and the tokens of one run: options, files and random numbers brought together, every disagreement refused.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moewave/host_layer.h"
#include "options.h"

namespace moewave::cli {

struct Problem {
  LayerShape shape;
  int ranks = 1;
  HostWeights weights;
  HostBatch batch;
  std::string routing;             ///< in use: "file", "uniform", "zipf:S", "single:E"
  std::vector<std::string> notes;  ///< what the files hold and was left aside, a line each

  std::int64_t max_tokens() const;                ///< of one rank
  std::vector<std::int64_t> expert_rows() const;  ///< [E], valid routes
};

/// Throws InputError naming both sides of a disagreement, Error when the tensors cannot fit into memory.
Problem load_problem(const RunOptions& options, bool with_reference);

}  // namespace moewave::cli
