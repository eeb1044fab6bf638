// The numbers of a tensor map: how the copy engine sees the weights.
#pragma once

#include <cstdint>
#include <string>

#include "moewave/bf16.h"
#include "moewave/error.h"

namespace moewave {

inline constexpr int kMapDimensions = 4;
inline constexpr std::uint64_t kMapAlignment = 16;  // of address and strides

/// A BF16 tensor, innermost dimension first, and the box that one copy fetches of it. A dimension of size 1 is as good
/// as none.
struct TensorMapShape {
  int dimensions = 0;
  std::uint64_t sizes[kMapDimensions] = {};
  std::uint64_t strides[kMapDimensions - 1] = {};  // bytes from an index to the next, of dimensions 1 and following
  std::uint32_t box[kMapDimensions] = {};
};

/// [experts, rows, columns], packed. No experts: a map of one that is never loaded, since a map of none cannot be.
inline TensorMapShape matrix_map_shape(std::int64_t columns, std::int64_t rows, std::int64_t experts, int box_columns,
                                       int box_rows) {
  TensorMapShape shape{.dimensions = 3};
  shape.sizes[0] = static_cast<std::uint64_t>(columns);
  shape.sizes[1] = static_cast<std::uint64_t>(rows);
  shape.sizes[2] = static_cast<std::uint64_t>(experts > 0 ? experts : 1);
  shape.strides[0] = shape.sizes[0] * sizeof(Bf16);
  shape.strides[1] = shape.sizes[1] * shape.strides[0];
  shape.box[0] = static_cast<std::uint32_t>(box_columns);
  shape.box[1] = static_cast<std::uint32_t>(box_rows);
  shape.box[2] = 1;
  return shape;
}

/// [experts, 2, rows, columns]: two matrices an expert, `pair_bytes` apart, the experts `expert_bytes` apart; a box has
/// `box_pair` matrices.
inline TensorMapShape pair_map_shape(std::int64_t columns, std::int64_t rows, std::int64_t experts,
                                     std::uint64_t pair_bytes, std::uint64_t expert_bytes, int box_columns,
                                     int box_rows, int box_pair) {
  TensorMapShape shape = matrix_map_shape(columns, rows, experts, box_columns, box_rows);
  shape.dimensions = 4;
  shape.sizes[3] = shape.sizes[2];
  shape.sizes[2] = 2;
  shape.strides[1] = pair_bytes;
  shape.strides[2] = expert_bytes;
  shape.box[2] = static_cast<std::uint32_t>(box_pair);
  shape.box[3] = 1;
  return shape;
}

/// What the hardware allows. Throws InputError naming the tensor and the value.
inline void check_map_shape(const std::string& name, const TensorMapShape& shape) {
  constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32;
  constexpr std::uint64_t kMostStride = std::uint64_t{1} << 40;
  const auto require = [&](const char* what, int dimension, std::uint64_t value, std::uint64_t limit) {
    if (value < limit) return;
    throw InputError(name + ": the " + what + " of dimension " + std::to_string(dimension) + " is " +
                     std::to_string(value) + "; it must be below " + std::to_string(limit));
  };
  for (int i = 0; i < shape.dimensions; ++i) require("size", i, shape.sizes[i], kMostElements);
  for (int i = 1; i < shape.dimensions; ++i) {
    require("stride in bytes", i, shape.strides[i - 1], kMostStride);
    if (shape.strides[i - 1] % kMapAlignment == 0) continue;
    throw InputError(name + ": the stride of dimension " + std::to_string(i) + " is " +
                     std::to_string(shape.strides[i - 1]) + " bytes; it must be a multiple of " +
                     std::to_string(kMapAlignment));
  }
}

/// Throws InputError unless the address is there and aligned to 16 bytes.
inline void check_address(const std::string& name, const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value == 0) throw InputError(name + " is missing");
  if (value % kMapAlignment != 0) {
    throw InputError(name + " is at address " + std::to_string(value) + "; it must be a multiple of " +
                     std::to_string(kMapAlignment));
  }
}

}  // namespace moewave
