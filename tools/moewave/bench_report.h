// What bench prints.
#pragma once

#include <string>
#include <vector>

#include "bench_check.h"
#include "bench_layer.h"
#include "bench_numbers.h"
#include "options.h"

namespace moewave::cli {

struct BenchReport {
  const BenchOptions& options;
  LayerShape shape;
  std::vector<int> devices;  ///< of each rank
  std::vector<std::int64_t> tokens_per_rank;
  std::string routing;
  Tuning tuning;
  CudaLayerBytes bytes;  ///< of a rank
  BenchTimes times;
  CallReport call;
  SampleCheck check;
};

std::string bench_text(const BenchReport& report);
std::string bench_json(const BenchReport& report);

}  // namespace moewave::cli
