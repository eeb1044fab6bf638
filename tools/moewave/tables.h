// What people read on stdout.
#pragma once

#include <string>
#include <vector>

#include "compare.h"
#include "compute.h"
#include "options.h"
#include "problem.h"

namespace moewave::cli {

/// Everything there is to say about one run. `checks` and `output_errors` are empty unless it was verified.
struct Report {
  const RunOptions& options;
  const Problem& problem;
  const RunResult& result;
  bool verified = false;
  std::vector<Check> checks;
  std::vector<double> output_errors;  ///< of each rank

  bool ok() const;
};

std::string report_text(const Report& report);

}  // namespace moewave::cli
