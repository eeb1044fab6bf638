#include "bench_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "build_info.h"
#include "gpus.h"
#include "moewave/version.h"
#include "text.h"

namespace moewave::cli {
namespace {

using Json = nlohmann::ordered_json;

// The largest of the GPUs: it sets the time.
double most(const std::vector<GpuWork>& work, double (*value)(const GpuWork&)) {
  double result = 0;
  for (const GpuWork& gpu : work) result = std::max(result, value(gpu));
  return result;
}
double flops(const std::vector<GpuWork>& work) {
  return most(work, [](const GpuWork& gpu) { return gpu.flops; });
}
double link_bytes(const std::vector<GpuWork>& work) {
  return most(work, [](const GpuWork& gpu) { return std::max(gpu.link_in, gpu.link_out); });
}
double hbm_bytes(const std::vector<GpuWork>& work) {
  return most(work, [](const GpuWork& gpu) { return gpu.hbm; });
}

std::string tokens_text(const std::vector<std::int64_t>& tokens) {
  const bool equal = std::all_of(tokens.begin(), tokens.end(), [&](std::int64_t t) { return t == tokens[0]; });
  if (equal) return fmt::format("{} a rank", tokens[0]);
  return fmt::format("{} by rank",
                     fmt::join(tokens.begin(), tokens.begin() + std::min<std::ptrdiff_t>(16, std::ssize(tokens)), " "));
}

std::string row(const char* mode, const TimeSummary& time, const BenchReport& report,
                const std::vector<GpuWork>& work) {
  const Floor floor = floor_of(work);
  return fmt::format("  {:<10}{:>10.4f}{:>10.4f}{:>10.4f}{:>10.1f}{:>10.1f}{:>10.1f}{:>10.4f}{:>9.2f}{:>10}\n", mode,
                     time.median * 1e3, time.min * 1e3, time.max * 1e3, flops(work) / time.median * 1e-12,
                     link_bytes(work) / time.median * 1e-9, hbm_bytes(work) / time.median * 1e-9, floor.seconds * 1e3,
                     floor.seconds > 0 ? time.median / floor.seconds : 0.0, report.check.wrong);
}

Json time_json(const TimeSummary& time, const Floor& floor) {
  return {{"median_seconds", time.median},
          {"min_seconds", time.min},
          {"max_seconds", time.max},
          {"ratio_to_floor", floor.seconds > 0 ? Json(time.median / floor.seconds) : Json(nullptr)}};
}

}  // namespace

std::string bench_text(const BenchReport& report) {
  const LayerShape& shape = report.shape;
  const std::vector<GpuWork> work = work_of_gpus(shape, report.call, report.devices);
  const std::size_t gpus = std::set<int>(report.devices.begin(), report.devices.end()).size();
  std::string text = fmt::format("# moewave {} bench, commit {}: forward, bf16, {} on {}, {}\n", kVersion,
                                 std::string_view(kBuildCommit) == "" ? "unknown" : kBuildCommit,
                                 plural(static_cast<std::int64_t>(report.devices.size()), "rank"),
                                 plural(static_cast<std::int64_t>(gpus), "GPU"),
                                 gpu_state().gpus[static_cast<std::size_t>(report.devices[0])].name);
  text += fmt::format("# layer    {}H {}, I {}, {}, top-{}, shared S {}\n",
                      report.options.preset.empty() ? "" : report.options.preset + ": ", shape.hidden,
                      shape.intermediate, plural(shape.experts, "expert"), shape.topk, shape.shared_intermediate);
  text += fmt::format("# tokens   {}, routing {}, seed {}\n", tokens_text(report.tokens_per_rank), report.routing,
                      report.options.run.seed);
  text += fmt::format("# tuning   minibatch {}, ring {}, {} a rank, {} of which communicate\n",
                      plural(report.tuning.minibatch_rows, "row"), plural(report.tuning.ring_tokens, "token"),
                      plural(report.tuning.sms, "SM"), report.tuning.comm_sms);
  text += fmt::format("# memory   {} a rank besides weights and tokens\n", human_bytes(report.bytes.sum()));
  text += fmt::format(
      "# calls    {} to warm up, {} timed; times of the slowest rank, rates of the busiest GPU; floor: {}\n",
      report.options.warmup, report.options.iterations, floor_of(work).limit);
  text += fmt::format("# check    {} against FP64: error {}, bound of a row {}\n", plural(report.check.rows, "token"),
                      human_error(report.check.relative_error), human_error(report.check.bound));
  text += fmt::format("#{:<11}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>9}{:>10}\n", " calls", "median", "min",
                      "max", "compute", "link", "memory", "floor", "ratio", "wrong");
  text += fmt::format("#{:<11}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>9}{:>10}\n", "", "ms", "ms", "ms", "TFLOP/s",
                      "GB/s", "GB/s", "ms", "", "tokens");
  text += row("isolated", summary_of(report.times.isolated), report, work);
  const double sustained = report.times.sustained;
  text += row("sustained", {sustained, sustained, sustained}, report, work);
  return text;
}

std::string bench_json(const BenchReport& report) {
  const LayerShape& shape = report.shape;
  const std::vector<GpuWork> work = work_of_gpus(shape, report.call, report.devices);
  const Floor floor = floor_of(work);
  Json json = {{"format", "moewave-bench"}, {"format_version", 1}, {"version", kVersion}, {"commit", kBuildCommit}};
  json["direction"] = "forward";
  json["dtype"] = "bf16";
  json["preset"] = report.options.preset.empty() ? Json(nullptr) : Json(report.options.preset);
  json["shape"] = {{"hidden", shape.hidden},
                   {"intermediate", shape.intermediate},
                   {"experts", shape.experts},
                   {"topk", shape.topk},
                   {"shared_intermediate", shape.shared_intermediate}};
  json["ranks"] = report.devices.size();
  json["device_of_rank"] = report.devices;
  json["gpu"] = gpu_state().gpus[static_cast<std::size_t>(report.devices[0])].name;
  json["tokens_per_rank"] = report.tokens_per_rank;
  json["routing"] = report.routing;
  json["seed"] = report.options.run.seed;
  json["tuning"] = {{"minibatch_rows", report.tuning.minibatch_rows},
                    {"ring_tokens", report.tuning.ring_tokens},
                    {"sms", report.tuning.sms},
                    {"comm_sms", report.tuning.comm_sms}};
  json["layer_bytes_per_rank"] = report.bytes.sum();
  json["warmup"] = report.options.warmup;
  json["iterations"] = report.options.iterations;
  json["work_of_gpus"] = Json::array();
  for (const GpuWork& gpu : work) {
    json["work_of_gpus"].push_back({{"flops", gpu.flops},
                                    {"link_in_bytes", gpu.link_in},
                                    {"link_out_bytes", gpu.link_out},
                                    {"memory_bytes", gpu.hbm}});
  }
  json["floor_seconds"] = floor.seconds;
  json["floor_limit"] = floor.limit;
  json["isolated"] = time_json(summary_of(report.times.isolated), floor);
  json["isolated"]["seconds"] = report.times.isolated;
  const double sustained = report.times.sustained;
  json["sustained"] = {{"seconds", sustained},
                       {"ratio_to_floor", floor.seconds > 0 ? Json(sustained / floor.seconds) : Json(nullptr)}};
  json["check"] = {{"tokens", report.check.rows},
                   {"wrong", report.check.wrong},
                   {"relative_error", report.check.relative_error},
                   {"bound", report.check.bound}};
  json["ok"] = report.check.ok();
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace moewave::cli
