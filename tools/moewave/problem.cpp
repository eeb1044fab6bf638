#include "problem.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <numeric>
#include <optional>

#include "gpus.h"
#include "io/layer_files.h"
#include "moewave/error.h"
#include "text.h"

namespace moewave::cli {

namespace {

constexpr std::int64_t kDefaultHidden = 256;
constexpr std::int64_t kDefaultIntermediate = 512;
constexpr std::int64_t kDefaultExperts = 8;
constexpr std::int64_t kDefaultTopk = 2;
constexpr std::int64_t kDefaultTokens = 64;

// A size as one place states it.
struct Statement {
  std::string source;
  std::optional<std::int64_t> value;
};

std::optional<std::int64_t> agreed(const char* what, std::initializer_list<Statement> statements) {
  const Statement* first = nullptr;
  for (const Statement& statement : statements) {
    if (!statement.value) continue;
    if (first == nullptr) first = &statement;
    if (*first->value != *statement.value) {
      throw InputError(fmt::format("{}: {} says {}, {} says {}; they must agree", what, first->source, *first->value,
                                   statement.source, *statement.value));
    }
  }
  return first == nullptr ? std::nullopt : first->value;
}

int resolve_ranks(const RunOptions& options, const std::vector<std::int64_t>& file_tokens) {
  Statement list{"--tokens", std::nullopt};
  if (options.tokens.size() > 1) list.value = static_cast<std::int64_t>(options.tokens.size());
  Statement file{"tokens_per_rank of " + options.inputs, std::nullopt};
  if (!file_tokens.empty()) file.value = static_cast<std::int64_t>(file_tokens.size());
  const bool on_gpus = options.backend == Backend::kCuda;
  const auto fallback = on_gpus ? static_cast<std::int64_t>(gpu_state().usable_devices().size()) : 1;
  const std::int64_t ranks = agreed("ranks", {{"--ranks", options.ranks}, list, file}).value_or(fallback);
  if (ranks > kMaxRanks) {
    throw InputError(fmt::format("ranks {} is not allowed; allowed are 1 to {}", ranks, kMaxRanks));
  }
  return static_cast<int>(ranks);
}

std::int64_t checked_sum(const std::vector<std::int64_t>& tokens) {
  std::int64_t sum = 0;
  for (const std::int64_t count : tokens) {
    if (__builtin_add_overflow(sum, count, &sum)) {
      throw InputError(fmt::format("tokens of all ranks exceed {}", std::numeric_limits<std::int64_t>::max()));
    }
  }
  return sum;
}

// Tokens of each rank. `rows` is the number of tokens of the inputs file, if there is one.
std::vector<std::int64_t> resolve_tokens(const RunOptions& options, int ranks,
                                         const std::vector<std::int64_t>& file_tokens,
                                         std::optional<std::int64_t> rows) {
  std::vector<std::int64_t> tokens = options.tokens;
  if (tokens.size() == 1) tokens.assign(static_cast<std::size_t>(ranks), options.tokens[0]);
  if (!tokens.empty() && !file_tokens.empty() && tokens != file_tokens) {
    throw InputError(fmt::format("tokens: --tokens says {}, tokens_per_rank of {} says {}; they must agree",
                                 fmt::join(tokens, ","), options.inputs, fmt::join(file_tokens, ",")));
  }
  if (tokens.empty()) tokens = file_tokens;
  if (tokens.empty()) {
    for (int rank = 0; rank < ranks; ++rank) {
      tokens.push_back(rows ? even_share(*rows, ranks, rank) : kDefaultTokens);
    }
  }
  const std::int64_t sum = checked_sum(tokens);
  if (rows && sum != *rows) {
    throw InputError(fmt::format("tokens: {} on {} make {}, {} holds {}; they must agree", fmt::join(tokens, ","),
                                 plural(ranks, "rank"), sum, options.inputs, *rows));
  }
  return tokens;
}

// Enough experts for every id of the file, where neither a weights file nor the user says how many there are.
std::int64_t experts_for(const HostBatch& batch, std::int64_t topk) {
  const auto highest = std::max_element(batch.topk_ids.begin(), batch.topk_ids.end());
  const std::int64_t used = highest == batch.topk_ids.end() ? 0 : std::int64_t{*highest} + 1;
  return std::min(std::max({kDefaultExperts, topk, used}), kMaxExperts);
}

LayerShape resolve_shape(const RunOptions& options, const std::optional<io::LoadedWeights>& weights,
                         const std::optional<io::LoadedInputs>& inputs, bool routes_from_file) {
  const auto of_weights = [&](std::int64_t io::LoadedWeights::*size) {
    return Statement{options.weights, weights ? std::optional((*weights).*size) : std::nullopt};
  };
  const auto of_inputs = [&](std::int64_t io::LoadedInputs::*size, bool used) {
    return Statement{options.inputs, inputs && used ? std::optional((*inputs).*size) : std::nullopt};
  };
  LayerShape shape;
  shape.hidden = agreed("hidden size", {{"--hidden", options.hidden},
                                        of_weights(&io::LoadedWeights::hidden),
                                        of_inputs(&io::LoadedInputs::hidden, true)})
                     .value_or(kDefaultHidden);
  shape.intermediate = agreed("intermediate size",
                              {{"--intermediate", options.intermediate}, of_weights(&io::LoadedWeights::intermediate)})
                           .value_or(kDefaultIntermediate);
  shape.shared_intermediate =
      agreed("shared intermediate size", {{"--shared-intermediate", options.shared_intermediate},
                                          of_weights(&io::LoadedWeights::shared_intermediate)})
          .value_or(0);
  const auto experts = agreed("experts", {{"--experts", options.experts}, of_weights(&io::LoadedWeights::experts)});
  const auto topk = agreed("top-k", {{"--topk", options.topk}, of_inputs(&io::LoadedInputs::topk, routes_from_file)});
  shape.topk = topk ? *topk : std::min(kDefaultTopk, experts.value_or(kDefaultTopk));
  shape.experts =
      experts ? *experts : experts_for(inputs && routes_from_file ? inputs->batch : HostBatch{}, shape.topk);
  shape.clamp = options.clamp;
  shape.shared_clamp = options.shared_clamp;
  if (shape.shared_clamp && shape.shared_intermediate == 0) {
    throw InputError(
        fmt::format("--shared-clamp {} is given, but the layer has no shared expert", *shape.shared_clamp));
  }
  return shape;
}

std::optional<double> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    double kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return std::nullopt;
}

// Only tensors that are certain to exist are counted: what is refused here could not have run. Without it the kernel of
// the operating system may kill the process instead of letting an allocation fail.
void check_memory(const LayerShape& shape, std::int64_t tokens, bool backward, bool with_reference) {
  const auto hidden = static_cast<double>(shape.hidden);
  const double weights = 3 * hidden *
                         (static_cast<double>(shape.experts) * static_cast<double>(shape.intermediate) +
                          static_cast<double>(shape.shared_intermediate));
  const double activations = static_cast<double>(tokens) * hidden;
  double bytes = 2 * weights + 2 * 2 * activations + 8 * static_cast<double>(tokens) * static_cast<double>(shape.topk);
  if (backward) bytes += 4 * weights + 2 * 2 * activations;
  if (with_reference) bytes += 8 * (backward ? weights + 2 * activations : activations);
  const std::optional<double> available = available_memory();
  if (available && bytes > *available) {
    constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
    throw Error(fmt::format("out of memory: the tensors alone need {:.1f} GiB, {:.1f} GiB are available", bytes / kGiB,
                            *available / kGiB));
  }
}

HostBatch make_batch(const RunOptions& options, Problem& problem, std::optional<io::LoadedInputs>& inputs,
                     const std::vector<std::int64_t>& tokens) {
  if (!inputs) return random_batch(problem.shape, tokens, problem.routing, options.seed, options.backward);
  HostBatch batch = std::move(inputs->batch);
  batch.tokens_per_rank = tokens;
  if (problem.routing != "file") {
    HostBatch random = random_batch(problem.shape, tokens, problem.routing, options.seed, false);
    batch.topk_ids = std::move(random.topk_ids);
    batch.topk_weights = std::move(random.topk_weights);
    problem.notes.push_back(
        fmt::format("{}: routes left aside because of --routing {}", options.inputs, problem.routing));
  }
  return batch;
}

}  // namespace

std::int64_t Problem::max_tokens() const {
  return *std::max_element(batch.tokens_per_rank.begin(), batch.tokens_per_rank.end());
}

std::vector<std::int64_t> Problem::expert_rows() const {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(shape.experts), 0);
  for (const std::int32_t id : batch.topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];
  }
  return rows;
}

Problem load_problem(const RunOptions& options, bool with_reference) {
  Problem problem;
  validate(options.tuning);
  resolve_ranks(options, {});

  std::optional<io::LoadedInputs> inputs;
  if (!options.inputs.empty()) inputs = io::load_inputs(options.inputs);
  const std::vector<std::int64_t> file_tokens = inputs ? inputs->batch.tokens_per_rank : std::vector<std::int64_t>{};
  problem.ranks = resolve_ranks(options, file_tokens);
  std::optional<std::int64_t> rows;
  if (inputs) rows = static_cast<std::int64_t>(inputs->batch.topk_ids.size()) / std::max<std::int64_t>(1, inputs->topk);
  const std::vector<std::int64_t> tokens = resolve_tokens(options, problem.ranks, file_tokens, rows);

  std::optional<io::LoadedWeights> weights;
  if (!options.weights.empty()) weights = io::load_weights(options.weights, options.layer);
  problem.routing = !options.routing.empty() ? options.routing : inputs ? "file" : "uniform";
  problem.shape = resolve_shape(options, weights, inputs, problem.routing == "file");
  validate(problem.shape, problem.ranks);
  if (inputs && options.backward && inputs->batch.grad_output.empty() && *rows > 0) {
    throw InputError(fmt::format("--backward needs grad_output, which {} does not hold", options.inputs));
  }
  check_memory(problem.shape, checked_sum(tokens), options.backward, with_reference);

  if (weights) problem.notes = std::move(weights->notes);
  problem.batch = make_batch(options, problem, inputs, tokens);
  problem.weights = weights ? std::move(weights->weights) : random_weights(problem.shape, options.seed);
  validate(problem.shape, problem.weights);
  validate(problem.shape, problem.batch, options.backward);
  return problem;
}

}  // namespace moewave::cli
