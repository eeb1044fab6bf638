// Epilogue: what becomes of a tile's sums. They are rounded to BF16 at once, which frees the accumulators; the rest is
// cut into eight pieces that ride in the first steps of the next tile, while the tensor cores work.
//
//   gate-up  h = silu(g) u, staged and stored into the ring of h. Produces: counts on h of the tile. Consumer: the
//            producer of a down task.
//   down     each row's 256 columns, staged in two halves of eight rows and pushed into the combine slot at the
//            token's owner. Consumer: the owner's merge, after the exit flags.
//
// A warp holds 16 rows: lane l columns 8 j + 2 (l % 4) and the next of rows l / 4 and l / 4 + 8, in packed[2 j] and
// packed[2 j + 1].
#pragma once

#include <cstdint>

#include "kernels/sm90/block_memory.cuh"
#include "kernels/sm90/call.cuh"
#include "kernels/sm90/producer.cuh"
#include "kernels/sm90/swiglu.cuh"
#include "ptx/copies.cuh"
#include "ptx/matrix_store.cuh"
#include "ptx/wgmma.cuh"

namespace moewave::sm90 {

inline constexpr int kPieces = 8;
inline constexpr int kPacked = ptx::kAccumulators / 2;
inline constexpr int kWarpRows = 16;
inline constexpr int kHiddenChunkBytes = kWarpRows * kOperandRowBytes;  // a warp's rows of 64 columns of h

class Epilogue {
 public:
  __device__ __forceinline__ Epilogue(const Call& call, BlockMemory& memory)
      : call_(call), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int warp = static_cast<int>(threadIdx.x - kProducerThreads) / kWarp;
    first_row_ = warp * kWarpRows;
    staging_ = ptx::shared_address(memory.staging[warp]);
  }

  __device__ __forceinline__ bool is_pending() const { return kind_ != kNoTask; }

  /// Takes over the sums of a finished tile.
  __device__ __forceinline__ void take(const protocol::TaskRecord& task, const float (&sums)[ptx::kAccumulators],
                                       char* destination) {
    kind_ = task.kind;
    tile_ = task.tile;
    destination_ = destination;
    const std::int64_t width = is_gate_up(kind_) ? hidden_width() - std::int64_t{task.column} * protocol::kGateUpColumns
                                                 : call_.geometry().hidden -
                                                       std::int64_t{task.column} * protocol::kDownColumns;
    columns_ = static_cast<std::int32_t>(protocol::min64(width, protocol::kDownColumns));
    const float clamp = is_gate_up(kind_) ? clamp_of_kind() : INFINITY;
    if (clamp < INFINITY) {
#pragma unroll
      for (int i = 0; i < kPacked / 2; ++i) {
        packed_[i] = join(math::round_gate(sums[2 * i], clamp), math::round_gate(sums[2 * i + 1], clamp));
      }
#pragma unroll
      for (int i = kPacked / 2; i < kPacked; ++i) {
        packed_[i] = join(math::round_linear(sums[2 * i], clamp), math::round_linear(sums[2 * i + 1], clamp));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) packed_[i] = round_pair(sums[2 * i], sums[2 * i + 1]);
    }
  }

  /// Where lane l's results of a task go. Gate-up: lane 0, this warp's rows of the first 64 columns of h. Down: lanes 0
  /// to 15, a row each; null where the row is padding.
  __device__ __forceinline__ char* destination(const protocol::TaskRecord& task) const {
    if (is_gate_up(task.kind)) {
      return reinterpret_cast<char*>(hidden_tile(call_, is_shared(task.kind), task.hidden_place)) +
             std::int64_t{task.column} * 2 * kABytes + first_row_ * kOperandRowBytes;
    }
    const int row = first_row_ + lane_;
    if (lane_ >= kWarpRows || row >= task.rows) return nullptr;
    const std::int64_t number = std::int64_t{task.tile} * protocol::kTileRows + row;
    const std::int64_t hidden = call_.geometry().hidden;
    const std::int64_t column = std::int64_t{task.column} * protocol::kDownColumns;
    if (is_shared(task.kind)) {
      return reinterpret_cast<char*>(call_.workspace(call_.params.layout.workspace.shared_y) + number * hidden +
                                     column);
    }
    const protocol::RouteRef route = call_.schedule().row_route[number];
    return reinterpret_cast<char*>(call_.shared_of(route.rank, call_.params.layout.shared.slots) +
                                   route.route * hidden + column);
  }

  /// Pieces 0 to 7 in order, by all lanes.
  template <int kPiece>
  __device__ __forceinline__ void piece() {
    if (is_gate_up(kind_)) {
      gate_up_piece<kPiece>();
    } else {
      down_piece<kPiece>();
    }
  }

  /// After the last piece. What gate-up stored is to be counted once it has arrived.
  __device__ __forceinline__ void end_pieces() {
    counts_ = is_gate_up(kind_) && lane_ == 0;
    counts_shared_ = is_shared(kind_);
    counted_tile_ = tile_;
    kind_ = kNoTask;
  }

  /// Counts on h of the last gate-up tile, if that is still to be done: the stores are waited for.
  __device__ __forceinline__ void count_hidden() {
    if (!counts_) return;
    counts_ = false;
    ptx::wait_bulk_stores_done();
    ptx::fence_proxy_async();
    ptx::add_release_gpu(hidden_counter(call_, counts_shared_, counted_tile_), 1);
  }

  __device__ __forceinline__ void flush() {
    piece<0>(), piece<1>(), piece<2>(), piece<3>();
    piece<4>(), piece<5>(), piece<6>(), piece<7>();
    end_pieces();
    count_hidden();
  }

 private:
  __device__ __forceinline__ std::int64_t hidden_width() const {
    return is_shared(kind_) ? call_.geometry().shared_intermediate : call_.geometry().intermediate;
  }
  __device__ __forceinline__ float clamp_of_kind() const {
    return is_shared(kind_) ? call_.params.shared_clamp : call_.params.clamp;
  }

  // Earlier stores have read the staging buffer.
  __device__ __forceinline__ static void wait_for_staging() {
    ptx::wait_bulk_stores_read();
    __syncwarp();
  }
  // What all lanes staged may be read by bulk copies.
  __device__ __forceinline__ static void end_staging() {
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  // 16 columns of h.
  template <int kPiece>
  __device__ __forceinline__ void gate_up_piece() {
    if constexpr (kPiece == 0) wait_for_staging();
    const float clamp = clamp_of_kind();
    std::uint32_t hidden[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kUp = kPacked / 2;
      const int at = 4 * kPiece + i;  // packed[2 j + half], j = 2 kPiece + i / 2
      const bool inside = (2 * kPiece + i / 2) * 8 < columns_;
      hidden[i] = inside ? swiglu_pair(packed_[at], packed_[at + kUp], clamp) : 0;
    }
    const int row = lane_ % 8 + (lane_ / 8 % 2) * 8;
    const int group = 2 * (kPiece % 4) + lane_ / 16;  // of 8 columns, in its 64
    ptx::store_matrices(staging_ + static_cast<std::uint32_t>((kPiece / 4) * kHiddenChunkBytes +
                                                              row * kOperandRowBytes + (group ^ (row % 8)) * 16),
                        hidden[0], hidden[1], hidden[2], hidden[3]);
    if constexpr (kPiece == kPieces - 1) {
      end_staging();
      if (lane_ == 0) {
        ptx::bulk_store(destination_, staging_, kHiddenChunkBytes);
        ptx::bulk_store(destination_ + kABytes, staging_ + kHiddenChunkBytes, kHiddenChunkBytes);
        ptx::commit_bulk_stores();
      }
    }
  }

  // 64 columns of eight rows.
  template <int kPiece>
  __device__ __forceinline__ void down_piece() {
    constexpr int kHalf = kPiece / 4;
    if constexpr (kPiece % 4 == 0) wait_for_staging();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first_group = 8 * (kPiece % 4) + 4 * i;
      ptx::store_matrices(
          staging_ + static_cast<std::uint32_t>((lane_ % 8) * kStagingPitch + (first_group + lane_ / 8) * 16),
          packed_[2 * first_group + kHalf], packed_[2 * first_group + 2 + kHalf], packed_[2 * first_group + 4 + kHalf],
          packed_[2 * first_group + 6 + kHalf]);
    }
    if constexpr (kPiece % 4 == 3) {
      end_staging();
      if (lane_ / 8 == kHalf && destination_ != nullptr) {
        ptx::bulk_store(destination_, staging_ + static_cast<std::uint32_t>((lane_ % 8) * kStagingPitch),
                        static_cast<std::uint32_t>(columns_) * 2);
        ptx::commit_bulk_stores();
      }
    }
  }

  const Call& call_;
  int lane_;
  int first_row_;  // of this warp, in its tile
  std::uint32_t staging_;

  // The tile whose pieces are pending.
  std::int32_t kind_ = kNoTask;
  std::int32_t tile_ = 0;
  std::int32_t columns_ = 0;  // that exist from the tile's first on
  char* destination_ = nullptr;
  std::uint32_t packed_[kPacked];

  // The gate-up tile whose count is pending.
  bool counts_ = false;
  bool counts_shared_ = false;
  std::int32_t counted_tile_ = 0;
};

}  // namespace moewave::sm90
