#include "results_json.h"

#include <nlohmann/json.hpp>

#include "moewave/version.h"

namespace moewave::cli {

namespace {

using Json = nlohmann::ordered_json;

template <typename T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json path_or_null(const std::string& path) { return path.empty() ? Json(nullptr) : Json(path); }

Json shape_json(const LayerShape& shape) {
  return {{"hidden", shape.hidden},
          {"intermediate", shape.intermediate},
          {"experts", shape.experts},
          {"topk", shape.topk},
          {"shared_intermediate", shape.shared_intermediate},
          {"clamp", or_null(shape.clamp)},
          {"shared_clamp", or_null(shape.shared_clamp)}};
}

Json tuning_json(const Tuning& tuning) {
  return {{"minibatch_rows", tuning.minibatch_rows},
          {"ring_tokens", tuning.ring_tokens},
          {"ring_rows", tuning.ring_rows},
          {"sms", tuning.sms},
          {"comm_sms", tuning.comm_sms}};
}

Json rank_json(const RankStats& stats) {
  return {{"tokens", stats.tokens},
          {"routes", stats.routes},
          {"rows", stats.rows},
          {"padded_rows", stats.padded_rows},
          {"pulled_tokens", stats.pulled_tokens},
          {"pulled_bytes", stats.pulled_bytes},
          {"per_route_bytes", stats.per_route_bytes},
          {"pushed_bytes", stats.pushed_bytes},
          {"macrobatches", stats.macrobatches},
          {"minibatches", stats.minibatches},
          {"seconds", stats.seconds}};
}

// [R, R], a row for each reader or writer.
Json matrix_json(const std::vector<std::int64_t>& values, std::size_t ranks) {
  Json rows = Json::array();
  for (std::size_t row = 0; row < ranks; ++row) {
    rows.push_back(std::vector<std::int64_t>(values.begin() + static_cast<std::ptrdiff_t>(row * ranks),
                                             values.begin() + static_cast<std::ptrdiff_t>((row + 1) * ranks)));
  }
  return rows;
}

Json call_json(const CallReport& call) {
  Json ranks = Json::array();
  for (const RankStats& stats : call.ranks) ranks.push_back(rank_json(stats));
  return {{"direction", call.backward ? "backward" : "forward"},
          {"ranks", ranks},
          {"pulled_bytes", matrix_json(call.pulled_bytes, call.ranks.size())},
          {"pushed_bytes", matrix_json(call.pushed_bytes, call.ranks.size())}};
}

Json checks_json(const Report& report) {
  Json checks = Json::array();
  for (const Check& check : report.checks) {
    Json entry = {{"tensor", check.tensor},
                  {"elements", check.elements},
                  {"max_abs_error", check.max_abs_error},
                  {"relative_error", check.relative_error},
                  {"bound", check.bound},
                  {"misplaced_non_finite", check.misplaced},
                  {"ok", check.ok()}};
    if (check.tensor == "output") entry["relative_error_by_rank"] = report.output_errors;
    checks.push_back(entry);
  }
  return checks;
}

std::vector<int> expert_owners(const Problem& problem) {
  std::vector<int> owners;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    const ExpertRange range = local_experts(problem.shape.experts, problem.ranks, rank);
    owners.insert(owners.end(), static_cast<std::size_t>(range.size()), rank);
  }
  return owners;
}

}  // namespace

std::string result_json(const Report& report) {
  const RunOptions& options = report.options;
  const Problem& problem = report.problem;
  const RunResult& result = report.result;

  Json json = {{"format", "moewave-result"}, {"format_version", 1}, {"version", kVersion}};
  json["command"] = report.verified ? "verify" : "run";
  json["backend"] = name_of(options.backend);
  json["dtype"] = "bf16";
  json["shape"] = shape_json(problem.shape);
  json["ranks"] = problem.ranks;
  json["tokens"] = problem.batch.tokens();
  json["tokens_per_rank"] = problem.batch.tokens_per_rank;
  json["backward"] = options.backward;
  json["routing"] = problem.routing;
  json["seed"] = options.seed;
  json["files"] = {{"weights", path_or_null(options.weights)},
                   {"layer", path_or_null(options.layer)},
                   {"inputs", path_or_null(options.inputs)},
                   {"output", path_or_null(options.output)},
                   {"timeline", path_or_null(options.timeline)}};
  json["notes"] = problem.notes;
  json["tuning_asked"] = tuning_json(options.tuning);
  json["tuning"] = result.tuning ? tuning_json(*result.tuning) : Json(nullptr);
  json["workspace_bytes_per_rank"] = result.workspace_bytes;
  json["saved_context_bytes"] = result.saved_bytes;
  json["seconds"] = result.seconds;
  json["expert_owner"] = expert_owners(problem);
  json["expert_rows"] = problem.expert_rows();
  json["calls"] = Json::array();
  for (const CallReport& call : result.calls) json["calls"].push_back(call_json(call));
  json["checks"] = report.verified ? checks_json(report) : Json(nullptr);
  json["ok"] = report.ok();
  // Paths need not be UTF-8; what is not becomes U+FFFD instead of an exception.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace moewave::cli
