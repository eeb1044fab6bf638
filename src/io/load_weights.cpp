#include <fmt/format.h>

#include <algorithm>

#include "io/checkpoint.h"
#include "io/layer_files.h"
#include "io/layer_tensors.h"
#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

/// Dtype, number of dimensions and no empty dimension: what must hold before sizes are taken from a shape.
void check_weight(const TensorRef& tensor, std::size_t dimensions, const char* meaning) {
  const auto& [file, info] = tensor;
  file->require_dtype(*info, {DType::kBf16, DType::kF32, DType::kF16});
  if (info->shape.size() != dimensions) {
    file->refuse(*info, fmt::format("is {}; allowed: {} dimensions, {}", shape_text(info->shape), dimensions, meaning));
  }
  if (info->elements == 0) {
    file->refuse(*info, fmt::format("is {}; every dimension must be at least 1", shape_text(info->shape)));
  }
}

void check_shape(const TensorRef& tensor, const std::vector<std::int64_t>& wanted, const std::string& because_of) {
  if (tensor.info->shape == wanted) return;
  tensor.file->refuse(*tensor.info, fmt::format("is {}; {} asks for {}", shape_text(tensor.info->shape),
                                                quote(because_of), shape_text(wanted)));
}

/// Gate and up [width, H], down [H, width]; gives width and H.
struct ProjectionShape {
  std::int64_t width;
  std::int64_t hidden;
};
ProjectionShape projection_shape(const TensorRef& gate) {
  check_weight(gate, 2, "[intermediate, hidden]");
  return {gate.info->shape[0], gate.info->shape[1]};
}

void check_projections(const Projections& projections, const ProjectionShape& shape, const std::string& because_of) {
  check_weight(projections[kGate], 2, "[intermediate, hidden]");
  check_weight(projections[kUp], 2, "[intermediate, hidden]");
  check_weight(projections[kDown], 2, "[hidden, intermediate]");
  check_shape(projections[kGate], {shape.width, shape.hidden}, because_of);
  check_shape(projections[kUp], {shape.width, shape.hidden}, because_of);
  check_shape(projections[kDown], {shape.hidden, shape.width}, because_of);
}

void read(const TensorRef& tensor, std::span<Bf16> out) { tensor.file->read(*tensor.info, out); }

std::vector<Bf16> read_all(const TensorRef& tensor) {
  std::vector<Bf16> result(static_cast<std::size_t>(tensor.info->elements));
  read(tensor, result);
  return result;
}

void load_stacked(const LayerTensors& layer, LoadedWeights& result) {
  check_weight(layer.stacked_gate_up, 3, "[experts, 2 * intermediate, hidden]");
  check_weight(layer.stacked_down, 3, "[experts, hidden, intermediate]");
  const auto& [file, gate_up] = layer.stacked_gate_up;
  const std::vector<std::int64_t>& down = layer.stacked_down.info->shape;
  const bool transposed = gate_up->shape[2] == 2 * down[1] && gate_up->shape[1] == down[2];
  if (gate_up->shape[0] == down[0] && transposed) {
    file->refuse(*gate_up, fmt::format("is {} beside a down_proj {}: transposed; allowed: [experts, 2 * intermediate, "
                                       "hidden] and [experts, hidden, intermediate]",
                                       shape_text(gate_up->shape), shape_text(down)));
  }
  if (gate_up->shape[1] % 2 != 0) {
    file->refuse(*gate_up, fmt::format("is {}; the second dimension must be even, gate rows first, then up rows",
                                       shape_text(gate_up->shape)));
  }
  result.experts = gate_up->shape[0];
  result.intermediate = gate_up->shape[1] / 2;
  result.hidden = gate_up->shape[2];
  check_shape(layer.stacked_down, {result.experts, result.hidden, result.intermediate}, gate_up->name);
  result.weights.gate_up = read_all(layer.stacked_gate_up);
  result.weights.down = read_all(layer.stacked_down);
}

void load_experts(const LayerTensors& layer, LoadedWeights& result) {
  const TensorRef& first = layer.experts.front()[kGate];
  const ProjectionShape shape = projection_shape(first);
  for (const Projections& expert : layer.experts) check_projections(expert, shape, first.info->name);
  result.experts = static_cast<std::int64_t>(layer.experts.size());
  result.intermediate = shape.width;
  result.hidden = shape.hidden;

  const auto matrix = static_cast<std::size_t>(first.info->elements);  // I * H
  result.weights.gate_up.resize(layer.experts.size() * 2 * matrix);
  result.weights.down.resize(layer.experts.size() * matrix);
  std::span<Bf16> gate_up(result.weights.gate_up);
  std::span<Bf16> down(result.weights.down);
  for (const Projections& expert : layer.experts) {
    read(expert[kGate], gate_up.first(matrix));
    read(expert[kUp], gate_up.subspan(matrix, matrix));
    read(expert[kDown], down.first(matrix));
    gate_up = gate_up.subspan(2 * matrix);
    down = down.subspan(matrix);
  }
}

void load_shared(const LayerTensors& layer, LoadedWeights& result) {
  const TensorRef& gate = layer.shared[kGate];
  const ProjectionShape shape = projection_shape(gate);
  if (shape.hidden != result.hidden) {
    gate.file->refuse(*gate.info,
                      fmt::format("is {}; the layer's hidden size is {}", shape_text(gate.info->shape), result.hidden));
  }
  check_projections(layer.shared, shape, gate.info->name);
  result.shared_intermediate = shape.width;
  result.weights.shared_gate = read_all(gate);
  result.weights.shared_up = read_all(layer.shared[kUp]);
  result.weights.shared_down = read_all(layer.shared[kDown]);
}

}  // namespace

LoadedWeights load_weights(const std::string& path, const std::string& layer_prefix) {
  Checkpoint checkpoint(path);
  LayerTensors layer = find_layer(checkpoint, layer_prefix);
  LoadedWeights result;
  if (layer.stacked()) {
    load_stacked(layer, result);
  } else {
    load_experts(layer, result);
  }
  if (layer.has_shared) load_shared(layer, result);
  result.notes = std::move(layer.notes);
  return result;
}

}  // namespace moewave::io
