// The three files of the command line: weights, inputs and output (docs/files.md), all safetensors.
// Every failure throws InputError with one line naming file and tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moewave/host_layer.h"

namespace moewave::io {

struct LoadedWeights {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t experts = 0;
  std::int64_t shared_intermediate = 0;  // 0: the file has no shared expert
  HostWeights weights;
  std::vector<std::string> notes;  // what was left aside, a line each
};

/// Reads a safetensors file or a `.safetensors.index.json` with its shards. `layer_prefix` may be empty, with or
/// without the last dot.
LoadedWeights load_weights(const std::string& path, const std::string& layer_prefix);

struct LoadedInputs {
  std::int64_t hidden = 0;
  std::int64_t topk = 0;
  HostBatch batch;  // tokens_per_rank is empty unless the file has it; grad_output likewise
};
LoadedInputs load_inputs(const std::string& path);

/// Throws InputError when `path` could not be written (folder missing, not writable, is a folder). Leaves nothing
/// behind. Returns where the bytes would end up: absolute, without links and dots.
std::string check_writable(const std::string& path);

/// Writes `output` and, with gradients (FP32 weight gradients), every gradient of docs/files.md. Written to a temporary
/// beside `path`, then renamed; on failure the temporary is removed and Error is thrown.
void save_outputs(const std::string& path, const LayerShape& shape, const std::vector<Bf16>& output,
                  const HostGradients* gradients);

}  // namespace moewave::io
