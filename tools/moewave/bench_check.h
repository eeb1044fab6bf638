// Some rows of a result against a product in FP64: the whole would take the CPU hours.
#pragma once

#include <cstdint>

#include "bench_layer.h"

namespace moewave::cli {

struct SampleCheck {
  std::int64_t rows = 0;      ///< tokens that were looked at
  std::int64_t wrong = 0;     ///< of these, further off than the bound allows, or NaN
  double relative_error = 0;  ///< of all of them together, Frobenius
  double bound = 0;           ///< of a row

  bool ok() const { return wrong == 0; }
};

/// A few dozen tokens, spread over all ranks, of the call that run_once() made.
SampleCheck check_samples(const BenchLayer& bench);

}  // namespace moewave::cli
