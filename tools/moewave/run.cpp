#include <fmt/format.h>

#include <chrono>
#include <optional>

#include "commands.h"
#include "compare.h"
#include "compute.h"
#include "cuda_backend.h"
#include "destinations.h"
#include "io/layer_files.h"
#include "moewave/error.h"
#include "problem.h"
#include "results_json.h"
#include "tables.h"
#include "timeline_json.h"
#include "write_file.h"

namespace moewave::cli {

namespace {

std::string failed_tensors(const std::vector<Check>& checks) {
  std::string names;
  for (const Check& check : checks) {
    if (!check.ok()) names += (names.empty() ? "" : ", ") + check.tensor;
  }
  return names;
}

void write_results(const Report& report) {
  const RunOptions& options = report.options;
  const RunResult& result = report.result;
  if (!options.output.empty()) {
    io::save_outputs(options.output, report.problem.shape, result.output,
                     result.gradients ? &*result.gradients : nullptr);
  }
  if (!options.timeline.empty())
    write_text_file(options.timeline, timeline_json(result.timeline, result.calls, name_of(options.backend)));
  if (options.json_to_stdout()) {
    write_stdout(result_json(report));
    return;
  }
  if (!options.json.empty()) write_text_file(options.json, result_json(report));
  write_stdout(report_text(report));
}

}  // namespace

int run_command(const RunOptions& options, bool verify) {
  check_destinations(options);
  const bool on_reference = options.backend == Backend::kReference;
  const Problem problem = load_problem(options, verify || on_reference);

  RunResult result;
  if (options.backend == Backend::kEmulator) result = run_emulator(problem, options);
  if (options.backend == Backend::kCuda) result = run_cuda(problem, options);
  std::optional<ReferenceResult> reference;
  if (verify || on_reference) {
    const auto start = std::chrono::steady_clock::now();
    reference = reference_with_progress(problem, options.backward);
    if (on_reference) {
      result = rounded(*reference, options.backward);
      result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  }

  Report report{options, problem, result, verify, {}, {}};
  if (verify) {
    report.checks = compare(problem, result, *reference);
    report.output_errors = output_error_by_rank(problem, result, *reference);
  }
  write_results(report);
  if (report.ok()) return kSuccess;
  print_error("verify failed, the error exceeds the bound: " + failed_tensors(report.checks));
  return kFailed;
}

}  // namespace moewave::cli
