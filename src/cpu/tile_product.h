// One tile's matrix product in the emulator: BF16 operands, FP32 sums. Every element of the result is summed over k in
// ascending order, one product after another, so its bits depend on the operands alone and not on the tile, its place
// or the instruction set (a product of two BF16 numbers is exact in FP32, so fused and separate multiply-add agree).
#pragma once

#include <cstdint>
#include <memory>

#include "moewave/bf16.h"

namespace moewave::cpu {

inline constexpr int kProductRows = 256;     // most rows of a tile
inline constexpr int kProductColumns = 256;  // most columns
inline constexpr int kProductDepth = 128;    // k taken at a time

/// acc[m][n] += sum_k a(m, k) * b(k, n). Operands are given by row pointers into BF16 memory.
class TileProduct {
 public:
  TileProduct();

  /// Sets the tile's size (rows at most kProductRows, columns at most kProductColumns) and the sums to zero.
  void begin(int rows, int columns);

  /// a_rows[m] points at k = 0 of row m, b_rows[n] at k = 0 of column n: both operands lie along k (C = A B^T).
  void add_rows_by_rows(const Bf16* const* a_rows, const Bf16* const* b_rows, std::int64_t depth);
  /// b is [depth, ...] with `stride` elements between its rows; `b` points at the tile's first column (C = A B).
  void add_rows_by_matrix(const Bf16* const* a_rows, const Bf16* b, std::int64_t stride, std::int64_t depth);
  /// Row k of either operand lies at a_rows[k], b_rows[k], each pointing at the tile's first row or column (C = A^T B).
  void add_columns_by_columns(const Bf16* const* a_rows, const Bf16* const* b_rows, std::int64_t depth);

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  float* row(int m) { return sums_.get() + std::int64_t{m} * kProductColumns; }

 private:
  template <typename PackA, typename PackB>
  void add(std::int64_t depth, PackA&& pack_a, PackB&& pack_b);

  int rows_ = 0;
  int columns_ = 0;
  std::unique_ptr<float[]> sums_;  // [kProductRows][kProductColumns]
  std::unique_ptr<float[]> a_;     // [kProductRows][kProductDepth]
  std::unique_ptr<float[]> b_;     // [kProductDepth][kProductColumns]
};

}  // namespace moewave::cpu
