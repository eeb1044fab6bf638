// Which tensor of a checkpoint is which part of a layer: names and layouts, no data.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace moewave::io {

/// Gate, up and down projection of one expert.
using Projections = std::array<TensorRef, 3>;
inline constexpr std::size_t kGate = 0;
inline constexpr std::size_t kUp = 1;
inline constexpr std::size_t kDown = 2;

/// A layer's tensors: either both stacked tensors or every expert's own. Nothing is missing and nothing is unknown;
/// shapes are not checked yet.
struct LayerTensors {
  TensorRef stacked_gate_up;
  TensorRef stacked_down;
  std::vector<Projections> experts;  // empty when stacked
  bool has_shared = false;
  Projections shared;
  std::vector<std::string> notes;

  bool stacked() const { return stacked_down.info != nullptr; }
};

/// Finds the layer under `prefix` (with or without the last dot; may be empty). Throws InputError that names the
/// prefixes of the checkpoint's MoE layers when there is none, otherwise the first tensor that is missing or cannot be
/// used.
LayerTensors find_layer(Checkpoint& checkpoint, const std::string& prefix);

}  // namespace moewave::io
