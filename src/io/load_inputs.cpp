#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include "io/layer_files.h"
#include "io/safetensors.h"
#include "io/text.h"
#include "layer/plural.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"hidden_states", "topk_ids", "topk_weights", "grad_output",
                                                    "tokens_per_rank"};

/// A misspelt grad_output would otherwise be lost in silence.
void check_names(const SafetensorsFile& file) {
  for (const auto& [name, tensor] : file.tensors()) {
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      file.refuse(tensor, fmt::format("is unknown; allowed: {}, {}, {}, {}, {}", kNames[0], kNames[1], kNames[2],
                                      kNames[3], kNames[4]));
    }
  }
}

const TensorInfo& require(const SafetensorsFile& file, std::string_view name) {
  const TensorInfo* tensor = file.find(name);
  if (tensor == nullptr) throw InputError(fmt::format("{}: tensor '{}' is missing", quote(file.path()), name));
  return *tensor;
}

/// [tokens, columns]; `tokens` below 0 leaves both free, but an empty row is nothing to compute with.
void check_rows(const SafetensorsFile& file, const TensorInfo& tensor, std::int64_t tokens, std::int64_t columns,
                const char* meaning) {
  if (tensor.shape.size() != 2 || tensor.shape[1] < 1) {
    file.refuse(tensor, fmt::format("is {}; allowed: {}, the second at least 1", shape_text(tensor.shape), meaning));
  }
  if (tokens >= 0 && tensor.shape[0] != tokens) {
    file.refuse(tensor, fmt::format("has {}, hidden_states has {}", plural(tensor.shape[0], "row"), tokens));
  }
  if (columns >= 0 && tensor.shape[1] != columns) {
    file.refuse(tensor,
                fmt::format("is {}; allowed: {} = [{}, {}]", shape_text(tensor.shape), meaning, tokens, columns));
  }
}

template <typename T>
std::vector<T> read_all(const SafetensorsFile& file, const TensorInfo& tensor) {
  std::vector<T> result(static_cast<std::size_t>(tensor.elements));
  file.read(tensor, std::span<T>(result));
  return result;
}

std::vector<std::int32_t> read_ids(const SafetensorsFile& file, const TensorInfo& tensor) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  const auto wide = read_all<std::int64_t>(file, tensor);
  const auto bad = std::find_if(wide.begin(), wide.end(), [](std::int64_t id) { return id < -1 || id > kMax; });
  if (bad != wide.end()) {
    const std::int64_t route = bad - wide.begin();
    file.refuse(tensor, fmt::format("holds {} for token {}, slot {}; allowed: -1 (no route) or an expert's number",
                                    *bad, route / tensor.shape[1], route % tensor.shape[1]));
  }
  std::vector<std::int32_t> result(wide.size());
  std::transform(wide.begin(), wide.end(), result.begin(),
                 [](std::int64_t id) { return static_cast<std::int32_t>(id); });
  return result;
}

std::vector<std::int64_t> read_tokens_per_rank(const SafetensorsFile& file, const TensorInfo& tensor,
                                               std::int64_t tokens) {
  file.require_dtype(tensor, {DType::kI64});
  if (tensor.shape.size() != 1 || tensor.elements < 1) {
    file.refuse(tensor, fmt::format("is {}; allowed: [ranks], at least 1", shape_text(tensor.shape)));
  }
  auto result = read_all<std::int64_t>(file, tensor);
  std::int64_t left = tokens;
  for (std::size_t rank = 0; rank < result.size(); ++rank) {
    if (result[rank] < 0 || result[rank] > left) {
      file.refuse(tensor, fmt::format("gives rank {} {}; allowed: 0 to {}, what is left of {}", rank,
                                      plural(result[rank], "token"), left, tokens));
    }
    left -= result[rank];
  }
  if (left != 0)
    file.refuse(tensor, fmt::format("sums to {}, hidden_states has {}", tokens - left, plural(tokens, "row")));
  return result;
}

}  // namespace

LoadedInputs load_inputs(const std::string& path) {
  const SafetensorsFile file(path);
  check_names(file);
  const TensorInfo& hidden_states = require(file, "hidden_states");
  const TensorInfo& ids = require(file, "topk_ids");
  const TensorInfo& weights = require(file, "topk_weights");
  const TensorInfo* grad_output = file.find("grad_output");
  const TensorInfo* tokens_per_rank = file.find("tokens_per_rank");

  check_rows(file, hidden_states, -1, -1, "[tokens, hidden]");
  const std::int64_t tokens = hidden_states.shape[0];
  LoadedInputs result;
  result.hidden = hidden_states.shape[1];
  check_rows(file, ids, tokens, -1, "[tokens, k]");
  result.topk = ids.shape[1];
  check_rows(file, weights, tokens, result.topk, "[tokens, k]");
  if (grad_output != nullptr) check_rows(file, *grad_output, tokens, result.hidden, "[tokens, hidden]");

  // Small tensors first, so that their errors come before the long reads.
  HostBatch& batch = result.batch;
  if (tokens_per_rank != nullptr) batch.tokens_per_rank = read_tokens_per_rank(file, *tokens_per_rank, tokens);
  batch.topk_ids = read_ids(file, ids);
  batch.topk_weights = read_all<float>(file, weights);
  batch.hidden_states = read_all<Bf16>(file, hidden_states);
  if (grad_output != nullptr) batch.grad_output = read_all<Bf16>(file, *grad_output);
  return result;
}

}  // namespace moewave::io
