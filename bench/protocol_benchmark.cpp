// Cost of a schedule per route: rank 0 of 8, 384 experts, k 8, one worker, random ids, 2^16 to 2^22 routes of all ranks
// together. Promise: linear, that is, the time per route of the largest is within kAllowedRatio of that of the
// smallest. Exit code 1 if it is not. Other options of Google Benchmark apply.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "plan/planner.h"
#include "protocol/layout.h"

namespace moewave {
namespace {

constexpr int kRanks = 8;
constexpr std::int32_t kExperts = 384;
constexpr std::int32_t kTopk = 8;
constexpr std::int64_t kFewestRoutes = std::int64_t{1} << 16;
constexpr std::int64_t kMostRoutes = std::int64_t{1} << 22;
constexpr double kAllowedRatio = 1.5;

protocol::Geometry geometry_of(std::int64_t tokens) {
  LayerShape shape;
  shape.hidden = shape.intermediate = kDimensionMultiple;  // the schedule depends on neither
  shape.experts = kExperts;
  shape.topk = kTopk;
  return plan::make_geometry(shape, kRanks, tokens, plan::resolve_tuning(shape, kRanks, tokens, {}), 0);
}

class ScheduleBuild {
 public:
  explicit ScheduleBuild(std::int64_t routes)
      : tokens_(routes / (kRanks * kTopk)),
        layout_(geometry_of(tokens_)),
        context_(static_cast<std::size_t>(layout_.context.bytes)),
        workspace_(static_cast<std::size_t>(layout_.workspace.bytes)),
        tokens_per_rank_(kRanks, static_cast<std::int32_t>(tokens_)),
        ids_(static_cast<std::size_t>(routes)) {
    std::mt19937 random(1);
    std::uniform_int_distribution<std::int32_t> any_expert(0, kExperts - 1);
    for (std::int32_t& id : ids_) id = any_expert(random);
  }

  void run() {
    const protocol::Schedule schedule = layout_.context.schedule(context_.data());
    schedule.totals->bad_route = protocol::kNoBadRoute;
    const protocol::ScheduleTask task{layout_.geometry, 0, tokens_per_rank_.data(), schedule,
                                      layout_.workspace.scratch(workspace_.data())};
    protocol::PlaceScratch places;
    protocol::build_schedule<protocol::SingleLane>(
        task, 0, 1, places, [&](int rank) { return ids_.data() + rank * tokens_ * kTopk; }, [] { return true; });
    benchmark::DoNotOptimize(schedule.totals->rows);
    benchmark::ClobberMemory();
  }

 private:
  std::int64_t tokens_;
  protocol::Layout layout_;
  std::vector<char> context_, workspace_;
  std::vector<std::int32_t> tokens_per_rank_;
  std::vector<std::int32_t> ids_;
};

void build_schedule(benchmark::State& state) {
  ScheduleBuild build(state.range(0));
  build.run();  // touches all memory once
  for (auto _ : state) build.run();
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(build_schedule)
    ->RangeMultiplier(4)
    ->Range(kFewestRoutes, kMostRoutes)
    ->Unit(benchmark::kMicrosecond)
    ->MinTime(0.05)
    ->Repetitions(21);

// Prints as usual and keeps the best CPU time per route of each size: what others do on the machine only adds to it.
class RouteTimes : public benchmark::ConsoleReporter {
 public:
  RouteTimes() : ConsoleReporter(OO_None) {}

  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration || run.error_occurred) continue;
      const std::int64_t routes = std::stoll(run.run_name.args);
      const double ns = 1e9 * run.cpu_accumulated_time / static_cast<double>(run.iterations * routes);
      const auto [found, is_new] = best_ns_.try_emplace(routes, ns);
      found->second = std::min(found->second, ns);
    }
  }

  // False if the promise is broken.
  bool print_ratio() const {
    std::printf("\nroutes      ns a route (best of the repetitions, CPU time)\n");
    for (const auto& [routes, ns] : best_ns_) std::printf("%-10lld  %.2f\n", static_cast<long long>(routes), ns);
    const auto fewest = best_ns_.find(kFewestRoutes);
    const auto most = best_ns_.find(kMostRoutes);
    if (fewest == best_ns_.end() || most == best_ns_.end()) return true;
    const double ratio = std::max(most->second / fewest->second, fewest->second / most->second);
    const bool holds = ratio <= kAllowedRatio;
    std::printf("ratio of the largest and the smallest: %.2f, promised at most %.2f: %s\n", ratio, kAllowedRatio,
                holds ? "ok" : "FAIL");
    return holds;
  }

 private:
  std::map<std::int64_t, double> best_ns_;
};

}  // namespace

int run_benchmarks(int argc, char** argv) {
  // Repetitions of all sizes in random order: what else the machine does falls on all of them alike.
  std::string interleaving = "--benchmark_enable_random_interleaving=true";
  std::vector<char*> arguments(argv, argv + argc);
  arguments.insert(arguments.begin() + 1, interleaving.data());
  int count = argc + 1;
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  RouteTimes reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  return reporter.print_ratio() ? 0 : 1;
}

}  // namespace moewave

int main(int argc, char** argv) { return moewave::run_benchmarks(argc, argv); }
