// Writing the safetensors format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace moewave::io {

struct TensorData {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  ///< borrowed until the write is done
};

/// Writes the tensors through an AtomicFile, the widest elements first, so that each lies at a multiple of its own
/// size; the header is padded with spaces to a multiple of 64 bytes. Throws InputError when `path` cannot be written or
/// a tensor's bytes do not fit its shape, Error when writing fails.
void write_safetensors(const std::string& path, std::span<const TensorData> tensors);

}  // namespace moewave::io
