// moewave bench: times the layer on the GPUs and checks samples of what it computed.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bench_check.h"
#include "bench_layer.h"
#include "bench_report.h"
#include "commands.h"
#include "cuda_backend.h"
#include "destinations.h"
#include "io/layer_files.h"
#include "progress.h"
#include "write_file.h"

namespace moewave::cli {
namespace {

constexpr std::int64_t kDefaultHidden = 2048;
constexpr std::int64_t kDefaultIntermediate = 768;
constexpr std::int64_t kDefaultTopk = 8;
constexpr std::int64_t kDefaultTokens = 4096;
constexpr std::int64_t kDefaultExpertsPerRank = 16;
constexpr std::int64_t kRoutingHidden = 8;  // of a batch that is made for its routes alone

struct Plan {
  LayerShape shape;
  int ranks;
  std::vector<std::int64_t> tokens;
};

Plan make_plan(const BenchOptions& options, const std::optional<io::LoadedInputs>& inputs) {
  const RunOptions& run = options.run;
  Plan plan;
  const auto gpus = static_cast<std::int64_t>(gpu_state().usable_devices().size());
  const bool lists_ranks = run.tokens.size() > 1;
  const auto listed = static_cast<std::int64_t>(run.tokens.size());
  const std::int64_t ranks = run.ranks.value_or(lists_ranks ? listed : gpus);
  if (lists_ranks && ranks != listed) {
    throw InputError(fmt::format("ranks: --ranks says {}, --tokens names {}; they must agree", ranks, listed));
  }
  plan.ranks = static_cast<int>(ranks);
  plan.tokens = lists_ranks ? run.tokens
                            : std::vector<std::int64_t>(static_cast<std::size_t>(ranks),
                                                        run.tokens.empty() ? kDefaultTokens : run.tokens[0]);
  if (inputs && run.topk && *run.topk != inputs->topk) {
    throw InputError(
        fmt::format("top-k: --topk says {}, {} says {}; they must agree", *run.topk, run.inputs, inputs->topk));
  }
  LayerShape& shape = plan.shape;
  shape.hidden = run.hidden.value_or(kDefaultHidden);
  shape.intermediate = run.intermediate.value_or(kDefaultIntermediate);
  shape.experts = run.experts.value_or(options.experts_per_rank.value_or(kDefaultExpertsPerRank) * ranks);
  shape.topk = inputs ? inputs->topk : run.topk.value_or(std::min(kDefaultTopk, shape.experts));
  shape.shared_intermediate = run.shared_intermediate.value_or(0);
  shape.clamp = run.clamp;
  shape.shared_clamp = run.shared_clamp;
  validate(shape, plan.ranks);
  return plan;
}

// Routes of the file, repeated as often as needed.
HostBatch repeat_routes(const HostBatch& file, const Plan& plan, const std::string& path) {
  HostBatch batch;
  batch.tokens_per_rank = plan.tokens;
  const std::int64_t tokens = batch.tokens();
  if (file.topk_ids.empty() && tokens > 0) throw InputError(fmt::format("{} holds no routes", path));
  const auto routes = static_cast<std::size_t>(tokens * plan.shape.topk);
  for (std::size_t i = 0; i < routes; ++i) {
    batch.topk_ids.push_back(file.topk_ids[i % file.topk_ids.size()]);
    batch.topk_weights.push_back(file.topk_weights[i % file.topk_weights.size()]);
  }
  for (const std::int32_t id : file.topk_ids) {
    if (id >= -1 && id < plan.shape.experts) continue;
    throw InputError(fmt::format("{} holds expert id {}; it must be -1 to {}", path, id, plan.shape.experts - 1));
  }
  return batch;
}

HostBatch make_routes(const BenchOptions& options, const Plan& plan, const std::optional<io::LoadedInputs>& inputs,
                      const std::string& routing) {
  if (inputs) return repeat_routes(inputs->batch, plan, options.run.inputs);
  LayerShape narrow = plan.shape;
  narrow.hidden = kRoutingHidden;
  return random_batch(narrow, plan.tokens, routing, options.run.seed, false);
}

}  // namespace

int bench_command(const BenchOptions& options) {
  const RunOptions& run = options.run;
  check_destinations(run);
  const std::string routing = !run.routing.empty() ? run.routing : run.inputs.empty() ? "uniform" : "file";
  std::optional<io::LoadedInputs> inputs;
  if (routing == "file") inputs = io::load_inputs(run.inputs);
  const Plan plan = make_plan(options, inputs);
  const std::vector<int> devices = devices_of_ranks(plan.ranks);

  BenchReport report{options, plan.shape, devices, plan.tokens, routing, {}, {}, {}, {}, {}};
  {
    const Progress progress("bench");
    BenchLayer bench(plan.shape, devices, make_routes(options, plan, inputs, routing), run.tuning, run.seed);
    report.times = bench.time(options.warmup, options.iterations);
    bench.run_once();
    report.call = bench.layer().report();
    report.tuning = bench.layer().tuning();
    report.bytes = bench.layer().bytes();
    report.check = check_samples(bench);
  }
  if (run.json_to_stdout()) {
    write_stdout(bench_json(report));
  } else {
    if (!run.json.empty()) write_text_file(run.json, bench_json(report));
    write_stdout(bench_text(report));
  }
  if (report.check.ok()) return kSuccess;
  print_error(fmt::format("bench: {} of {} sampled tokens are wrong", report.check.wrong, report.check.rows));
  return kFailed;
}

}  // namespace moewave::cli
