#include <fmt/format.h>

#include "io/atomic_file.h"
#include "io/layer_files.h"
#include "io/safetensors_writer.h"
#include "io/text.h"
#include "layer/plural.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

template <typename T>
constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<Bf16> = DType::kBf16;

template <typename T>
void add(std::vector<TensorData>& tensors, const char* name, std::vector<std::int64_t> shape,
         const std::vector<T>& values) {
  tensors.push_back({name, kDTypeOf<T>, std::move(shape), std::as_bytes(std::span(values))});
}

void add_gradients(std::vector<TensorData>& tensors, const LayerShape& shape, std::int64_t tokens,
                   const HostGradients& gradients) {
  const std::int64_t hidden = shape.hidden;
  add(tensors, "grad_hidden_states", {tokens, hidden}, gradients.hidden_states);
  add(tensors, "grad_topk_weights", {tokens, shape.topk}, gradients.topk_weights);
  add(tensors, "grad_gate_up_proj", {shape.experts, 2 * shape.intermediate, hidden}, gradients.gate_up.f32);
  add(tensors, "grad_down_proj", {shape.experts, hidden, shape.intermediate}, gradients.down.f32);
  if (shape.shared_intermediate > 0) {
    add(tensors, "grad_shared_gate_proj", {shape.shared_intermediate, hidden}, gradients.shared_gate.f32);
    add(tensors, "grad_shared_up_proj", {shape.shared_intermediate, hidden}, gradients.shared_up.f32);
    add(tensors, "grad_shared_down_proj", {hidden, shape.shared_intermediate}, gradients.shared_down.f32);
  }
}

}  // namespace

std::string check_writable(const std::string& path) { return AtomicFile(path).target(); }

void save_outputs(const std::string& path, const LayerShape& shape, const std::vector<Bf16>& output,
                  const HostGradients* gradients) {
  const auto values = static_cast<std::int64_t>(output.size());
  if (shape.hidden < 1 || values % shape.hidden != 0) {
    throw InputError(fmt::format("{}: output has {}, no whole rows of the hidden size {}", quote(path),
                                 plural(values, "value"), shape.hidden));
  }
  const std::int64_t tokens = values / shape.hidden;
  std::vector<TensorData> tensors;
  add(tensors, "output", {tokens, shape.hidden}, output);
  if (gradients != nullptr) {
    if (gradients->weight_grad_dtype != GradDtype::kFloat32) {
      throw InputError(fmt::format("{}: weight gradients are BF16; an output file holds them as F32", quote(path)));
    }
    add_gradients(tensors, shape, tokens, *gradients);
  }
  write_safetensors(path, tensors);
}

}  // namespace moewave::io
