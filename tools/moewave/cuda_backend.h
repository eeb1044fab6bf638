// What the program does on GPUs. Builds without CUDA have these functions too; there they throw InputError.
#pragma once

#include "compute.h"
#include "gpus.h"
#include "options.h"
#include "problem.h"

namespace moewave::cli {

GpuState look_for_gpus();

/// Forward on the GPUs, with reports, and a timeline when asked for.
RunResult run_cuda(const Problem& problem, const RunOptions& options);

int bench_command(const BenchOptions& options);

}  // namespace moewave::cli
