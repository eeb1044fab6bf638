#include "tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "io/text.h"
#include "moewave/version.h"
#include "text.h"

namespace moewave::cli {

namespace {

using Row = std::vector<std::string>;

// Columns as wide as their widest cell, numbers to the right; the first `left` columns hold words.
std::string format_table(const std::vector<Row>& rows, std::size_t left) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = "  ";
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i < left ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string or_random(const std::string& path) { return path.empty() ? "random" : io::escape_controls(path); }

// Long lists are cut: a thousand ranks do not fit a line.
std::string list_text(const std::vector<std::int64_t>& values) {
  constexpr std::size_t kShown = 16;
  if (values.size() <= kShown) return fmt::format("{}", fmt::join(values, " "));
  return fmt::format("{} ...", fmt::join(values.begin(), values.begin() + kShown, " "));
}

std::string heading(const Report& report) {
  const Problem& problem = report.problem;
  const LayerShape& shape = problem.shape;
  std::string layer = fmt::format("H {}, I {}, {}, top-{}, ", shape.hidden, shape.intermediate,
                                  plural(shape.experts, "expert"), shape.topk);
  layer += shape.shared_intermediate == 0 ? "no shared expert"
                                          : fmt::format("shared expert S {}", shape.shared_intermediate);
  if (shape.clamp) layer += fmt::format(", clamp {}", *shape.clamp);
  if (shape.shared_clamp) layer += fmt::format(", shared clamp {}", *shape.shared_clamp);

  std::string text = fmt::format("moewave {} {}: {}, {}, bf16, {}\n", kVersion, report.verified ? "verify" : "run",
                                 name_of(report.options.backend), plural(problem.ranks, "rank"),
                                 report.options.backward ? "forward and backward" : "forward");
  text += fmt::format("  layer    {}\n", layer);
  text += fmt::format("  weights  {}\n",
                      or_random(report.options.weights) +
                          (report.options.layer.empty() ? "" : ", " + io::escape_controls(report.options.layer)));
  text += fmt::format("  tokens   {} ({} by rank), {}, routing {}\n", human_count(problem.batch.tokens()),
                      list_text(problem.batch.tokens_per_rank), or_random(report.options.inputs), problem.routing);
  for (const std::string& note : problem.notes) text += fmt::format("  note     {}\n", io::escape_controls(note));
  if (const auto& tuning = report.result.tuning) {
    text += fmt::format("  tuning   minibatch {}, ring {}, {} of which {} communicate\n",
                        plural(tuning->minibatch_rows, "row"), plural(tuning->ring_tokens, "token"),
                        plural(tuning->sms, "SM"), tuning->comm_sms);
    text += fmt::format("  memory   {} workspace a rank", human_bytes(report.result.workspace_bytes));
    text += report.options.backward
                ? fmt::format(", {} saved for backward by all ranks\n", human_bytes(report.result.saved_bytes))
                : "\n";
  }
  return text;
}

RankStats sum_of(const std::vector<RankStats>& ranks) {
  RankStats sum;
  for (const RankStats& rank : ranks) {
    sum.tokens += rank.tokens;
    sum.routes += rank.routes;
    sum.rows += rank.rows;
    sum.padded_rows += rank.padded_rows;
    sum.pulled_tokens += rank.pulled_tokens;
    sum.pulled_bytes += rank.pulled_bytes;
    sum.per_route_bytes += rank.per_route_bytes;
    sum.pushed_bytes += rank.pushed_bytes;
    sum.seconds = std::max(sum.seconds, rank.seconds);
  }
  return sum;
}

Row rank_row(const std::string& name, const RankStats& stats) {
  return {name,
          human_count(stats.tokens),
          human_count(stats.routes),
          human_count(stats.rows),
          human_count(stats.padded_rows),
          human_count(stats.pulled_tokens),
          human_bytes(stats.per_route_bytes),
          human_bytes(stats.pulled_bytes),
          human_bytes(stats.pushed_bytes),
          human_seconds(stats.seconds)};
}

std::string call_table(const Report& report, const CallReport& call) {
  const bool with_errors = report.verified && !call.backward;
  std::vector<Row> rows = {
      {"rank", "tokens", "routes", "rows", "padded", "pulled", "link per route", "link pulled once", "pushed", "time"}};
  if (with_errors) rows[0].push_back("output error");
  for (std::size_t rank = 0; rank < call.ranks.size(); ++rank) {
    rows.push_back(rank_row(std::to_string(rank), call.ranks[rank]));
    if (with_errors) rows.back().push_back(human_error(report.output_errors[rank]));
  }
  const RankStats sum = sum_of(call.ranks);
  rows.push_back(rank_row("all", sum));
  if (with_errors) rows.back().push_back(human_error(report.checks[0].relative_error));

  const char* times = report.options.backend == Backend::kCuda
                          ? "time: the launch on the GPU, waiting for the other ranks included"
                          : "times are the emulator's on this CPU, not a GPU's";
  std::string text = fmt::format("\n{} ({}; all: the slowest rank)\n", call.backward ? "Backward" : "Forward", times);
  text += format_table(rows, 1);
  if (sum.per_route_bytes > 0) {
    text += fmt::format("  pulling each token once a rank reads {:.0f} % of the bytes that a pull per route would\n",
                        100.0 * static_cast<double>(sum.pulled_bytes) / static_cast<double>(sum.per_route_bytes));
  }
  return text;
}

// The reference has no ranks that exchange anything: tokens and what the experts of each rank compute.
std::string reference_table(const Report& report) {
  const Problem& problem = report.problem;
  const std::vector<std::int64_t> expert_rows = problem.expert_rows();
  std::vector<Row> rows = {{"rank", "tokens", "rows"}};
  if (report.verified) rows[0].push_back("output error");
  for (int rank = 0; rank < problem.ranks; ++rank) {
    const ExpertRange range = local_experts(problem.shape.experts, problem.ranks, rank);
    const std::int64_t count =
        std::accumulate(expert_rows.begin() + range.begin, expert_rows.begin() + range.end, std::int64_t{0});
    const auto index = static_cast<std::size_t>(rank);
    rows.push_back({std::to_string(rank), human_count(problem.batch.tokens_per_rank[index]), human_count(count)});
    if (report.verified) rows.back().push_back(human_error(report.output_errors[index]));
  }
  return fmt::format("\nReference ({} on this CPU in FP64)\n", human_seconds(report.result.seconds)) +
         format_table(rows, 1);
}

std::string expert_load(const Problem& problem) {
  const std::vector<std::int64_t> rows = problem.expert_rows();
  const std::int64_t sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  const auto [least, most] = std::minmax_element(rows.begin(), rows.end());
  const double mean = static_cast<double>(sum) / static_cast<double>(rows.size());
  std::string text =
      fmt::format("\nExpert load\n  rows of an expert: mean {:.1f}, least {} (expert {}), most {} (expert {}", mean,
                  human_count(*least), least - rows.begin(), human_count(*most), most - rows.begin());
  text += sum > 0 ? fmt::format(", {:.2f} x mean)", static_cast<double>(*most) / mean) : ")";
  return text + fmt::format(", without rows {} of {}\n", std::count(rows.begin(), rows.end(), 0), rows.size());
}

std::string checks_table(const std::vector<Check>& checks) {
  std::vector<Row> rows = {{"tensor", "elements", "max abs", "error", "bound", ""}};
  for (const Check& check : checks) {
    rows.push_back({check.tensor, human_count(check.elements), human_error(check.max_abs_error),
                    human_error(check.relative_error), human_error(check.bound), check.ok() ? "ok" : "FAIL"});
    if (check.misplaced > 0) rows.back().back() += fmt::format(" ({} NaN or Inf misplaced)", check.misplaced);
  }
  return "\nAgainst the FP64 reference (error: relative, Frobenius)\n" + format_table(rows, 1);
}

}  // namespace

bool Report::ok() const {
  return std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.ok(); });
}

std::string report_text(const Report& report) {
  std::string text = heading(report);
  for (const CallReport& call : report.result.calls) text += call_table(report, call);
  if (report.result.calls.empty()) text += reference_table(report);
  text += expert_load(report.problem);
  if (report.verified) text += checks_table(report.checks);
  return text;
}

}  // namespace moewave::cli
