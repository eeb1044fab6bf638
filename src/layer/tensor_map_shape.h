// The numbers of a tensor map: how the copy engine sees a stack of matrices.
#pragma once

#include <cstdint>
#include <string>

#include "moewave/bf16.h"
#include "moewave/error.h"

namespace moewave {

/// A BF16 tensor [matrices, rows, columns], innermost dimension last, and the box that one copy fetches of it.
struct TensorMapShape {
  std::uint64_t columns = 0;
  std::uint64_t rows = 0;
  std::uint64_t matrices = 0;
  std::uint64_t row_bytes = 0;     // from a row to the next
  std::uint64_t matrix_bytes = 0;  // from a matrix to the next
  std::uint32_t box_columns = 0;
  std::uint32_t box_rows = 0;
};

inline constexpr std::uint64_t kMapAlignment = 16;  // of address and strides

/// A stack of rows x columns matrices, `stacked_rows` rows apart (more than `rows` where another matrix lies between,
/// as the up rows do behind the gate rows). No matrices: a map of one that is never loaded, since a map of none cannot
/// be.
inline TensorMapShape stacked_matrices(std::int64_t columns, std::int64_t rows, std::int64_t matrices,
                                       std::int64_t stacked_rows, int box_columns, int box_rows) {
  TensorMapShape shape;
  shape.columns = static_cast<std::uint64_t>(columns);
  shape.rows = static_cast<std::uint64_t>(rows);
  shape.matrices = static_cast<std::uint64_t>(matrices > 0 ? matrices : 1);
  shape.row_bytes = shape.columns * sizeof(Bf16);
  shape.matrix_bytes = static_cast<std::uint64_t>(stacked_rows) * shape.row_bytes;
  shape.box_columns = static_cast<std::uint32_t>(box_columns);
  shape.box_rows = static_cast<std::uint32_t>(box_rows);
  return shape;
}

/// What the hardware allows. Throws InputError naming the tensor and the value.
inline void check_map_shape(const std::string& name, const TensorMapShape& shape) {
  constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32;
  constexpr std::uint64_t kMostStride = std::uint64_t{1} << 40;
  const auto require = [&](const char* what, std::uint64_t value, std::uint64_t limit) {
    if (value < limit) return;
    throw InputError(name + ": " + what + " is " + std::to_string(value) + "; it must be below " +
                     std::to_string(limit));
  };
  require("the number of columns", shape.columns, kMostElements);
  require("the number of rows", shape.rows, kMostElements);
  require("the number of experts", shape.matrices, kMostElements);
  require("the bytes of an expert", shape.matrix_bytes, kMostStride);
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
