// Results against the FP64 reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compute.h"
#include "moewave/host_layer.h"
#include "problem.h"

namespace moewave::cli {

/// How far one tensor is from the reference.
///
/// The relative error is |result - reference| / |reference| in Frobenius norms; 0 / 0 is 0, so a reference of zeros
/// must be met exactly. NaN is right where the reference is NaN, and Inf where the reference is beyond BF16 with the
/// same sign; such elements take no part in the norms. Any other NaN or Inf counts as `misplaced`, makes both errors
/// NaN and fails. A difference below the smallest normal FP32 at a reference below it that is not zero counts as none:
/// no format of the layer has digits there.
struct Check {
  std::string tensor;
  std::int64_t elements = 0;
  double max_abs_error = 0;
  double relative_error = 0;
  double bound = 0;
  std::int64_t misplaced = 0;

  bool ok() const { return misplaced == 0 && relative_error <= bound; }  // false for NaN
};

std::vector<Check> compare(const Problem& problem, const RunResult& result, const ReferenceResult& reference);

/// Relative error of each rank's rows of `output`.
std::vector<double> output_error_by_rank(const Problem& problem, const RunResult& result,
                                         const ReferenceResult& reference);

}  // namespace moewave::cli
