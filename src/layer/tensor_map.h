// Encodes tensor maps through the driver.
#pragma once

#include <cuda.h>

#include <string>

#include "layer/tensor_map_shape.h"

namespace moewave {

/// A map with 128-byte swizzle that reads zeros outside the tensor. Throws InputError naming the tensor for what the
/// hardware does not allow, Error when the driver refuses or is too old.
CUtensorMap encode_tensor_map(const std::string& name, const Bf16* address, const TensorMapShape& shape);

}  // namespace moewave
