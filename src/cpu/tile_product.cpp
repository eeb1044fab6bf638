#include "cpu/tile_product.h"

#include <algorithm>
#include <cstring>

// One binary that uses the widest vectors of the machine it runs on. Sanitizers intercept too late for the resolvers
// that this needs, and only x86-64 is worth the variants.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define MOEWAVE_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOEWAVE_VECTOR_CLONES
#endif

namespace moewave::cpu {
namespace {

constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 32;

// sums[rows][columns] += a[rows][depth] * b[depth][columns], columns rounded up to kBlockColumns (the panels have
// room).
MOEWAVE_VECTOR_CLONES
void multiply_panels(const float* a, const float* b, float* sums, int rows, int columns, int depth) {
  for (int n = 0; n < columns; n += kBlockColumns) {
    for (int m = 0; m < rows; m += kBlockRows) {
      float block[kBlockRows][kBlockColumns];
      for (int i = 0; i < kBlockRows; ++i) {
        std::memcpy(block[i], sums + std::int64_t{m + i} * kProductColumns + n, sizeof(block[i]));
      }
      for (int k = 0; k < depth; ++k) {
        const float* b_row = b + std::int64_t{k} * kProductColumns + n;
        for (int i = 0; i < kBlockRows; ++i) {
          const float factor = a[std::int64_t{m + i} * kProductDepth + k];
          for (int j = 0; j < kBlockColumns; ++j) block[i][j] += factor * b_row[j];
        }
      }
      for (int i = 0; i < kBlockRows; ++i) {
        std::memcpy(sums + std::int64_t{m + i} * kProductColumns + n, block[i], sizeof(block[i]));
      }
    }
  }
}

}  // namespace

TileProduct::TileProduct()
    : sums_(std::make_unique<float[]>(kProductRows * kProductColumns)),
      a_(std::make_unique<float[]>(kProductRows * kProductDepth)),
      b_(std::make_unique<float[]>(kProductDepth * kProductColumns)) {}

void TileProduct::begin(int rows, int columns) {
  rows_ = rows;
  columns_ = columns;
  // Rows and columns past the tile's, up to the block size, are computed from whatever the panels hold and never read.
  std::fill_n(sums_.get(), std::int64_t{rows} * kProductColumns, 0.0f);
}

template <typename PackA, typename PackB>
void TileProduct::add(std::int64_t depth, PackA&& pack_a, PackB&& pack_b) {
  for (std::int64_t k = 0; k < depth; k += kProductDepth) {
    const int count = static_cast<int>(std::min<std::int64_t>(kProductDepth, depth - k));
    pack_a(k, count);
    pack_b(k, count);
    multiply_panels(a_.get(), b_.get(), sums_.get(), rows_, columns_, count);
  }
}

void TileProduct::add_rows_by_rows(const Bf16* const* a_rows, const Bf16* const* b_rows, std::int64_t depth) {
  add(
      depth,
      [&](std::int64_t k, int count) {
        for (int m = 0; m < rows_; ++m) {
          for (int i = 0; i < count; ++i) a_[std::int64_t{m} * kProductDepth + i] = to_float(a_rows[m][k + i]);
        }
      },
      [&](std::int64_t k, int count) {
        for (int n = 0; n < columns_; ++n) {
          for (int i = 0; i < count; ++i) b_[std::int64_t{i} * kProductColumns + n] = to_float(b_rows[n][k + i]);
        }
      });
}

void TileProduct::add_rows_by_matrix(const Bf16* const* a_rows, const Bf16* b, std::int64_t stride,
                                     std::int64_t depth) {
  add(
      depth,
      [&](std::int64_t k, int count) {
        for (int m = 0; m < rows_; ++m) {
          for (int i = 0; i < count; ++i) a_[std::int64_t{m} * kProductDepth + i] = to_float(a_rows[m][k + i]);
        }
      },
      [&](std::int64_t k, int count) {
        for (int i = 0; i < count; ++i) {
          const Bf16* row = b + (k + i) * stride;
          for (int n = 0; n < columns_; ++n) b_[std::int64_t{i} * kProductColumns + n] = to_float(row[n]);
        }
      });
}

void TileProduct::add_columns_by_columns(const Bf16* const* a_rows, const Bf16* const* b_rows, std::int64_t depth) {
  add(
      depth,
      [&](std::int64_t k, int count) {
        for (int i = 0; i < count; ++i) {
          for (int m = 0; m < rows_; ++m) a_[std::int64_t{m} * kProductDepth + i] = to_float(a_rows[k + i][m]);
        }
      },
      [&](std::int64_t k, int count) {
        for (int i = 0; i < count; ++i) {
          for (int n = 0; n < columns_; ++n) b_[std::int64_t{i} * kProductColumns + n] = to_float(b_rows[k + i][n]);
        }
      });
}

}  // namespace moewave::cpu
