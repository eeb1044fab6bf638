// stmatrix: a warp stores 8x8 matrices of 16-bit numbers, held as wgmma leaves its accumulators, into shared memory.
#pragma once

#include <cstdint>

namespace moewave::ptx {

/// stmatrix.x4: lane l of matrix i holds columns 2 * (l % 4) and the next of row l / 4 in `m<i>`; lane 8 * i + r gives
/// the address of row r (16 bytes) of matrix i.
__device__ __forceinline__ void store_matrices(std::uint32_t shared, std::uint32_t m0, std::uint32_t m1,
                                               std::uint32_t m2, std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace moewave::ptx
