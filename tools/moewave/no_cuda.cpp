// The backend cuda of a build without CUDA.
#include "cuda_backend.h"
#include "moewave/error.h"

namespace moewave::cli {

GpuState look_for_gpus() { return {{}, "this build is without CUDA"}; }

RunResult run_cuda(const Problem&, const RunOptions&) { throw InputError(look_for_gpus().obstacle); }
int bench_command(const BenchOptions&) {
  throw InputError("bench needs the backend cuda: " + look_for_gpus().obstacle);
}

}  // namespace moewave::cli
