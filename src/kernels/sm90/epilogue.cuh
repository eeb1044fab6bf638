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
  __device__ __forceinline__ Epilogue(const Call& call, BlockMemory& memory) : call_(call), memory_(memory) {}

  __device__ __forceinline__ bool is_pending() const { return pending_ >= 0; }

  /// Looks up where this lane's results of the task in `slot` will go: not while pieces are pending, and early enough
  /// to hide the latency. Gate-up: lane 0, the warp's rows of the first 64 columns of h. Down: lanes 0 to 15, a row
  /// each; null where the row is padding.
  __device__ __forceinline__ void find_destination(std::uint32_t slot) {
    const protocol::TaskRecord& task = memory_.slot[slot];
    destination_ = is_gate_up(task.kind) ? hidden_destination(task) : row_destination(task);
  }

  /// Takes over the sums of the task in `slot`.
  __device__ __forceinline__ void take(std::uint32_t slot, const float (&sums)[ptx::kAccumulators]) {
    pending_ = static_cast<std::int32_t>(slot);
    const std::int32_t kind = memory_.slot[slot].kind;
    const float clamp = is_gate_up(kind) ? clamp_of(kind) : INFINITY;
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

  /// Pieces 0 to 7 in order, by all lanes.
  template <int kPiece>
  __device__ __forceinline__ void piece() {
    const protocol::TaskRecord& task = memory_.slot[pending_];
    if (is_gate_up(task.kind)) {
      gate_up_piece<kPiece>(task);
    } else {
      down_piece<kPiece>(task);
    }
  }

  /// After the last piece. What gate-up stored is to be counted once it has arrived.
  __device__ __forceinline__ void end_pieces() {
    const protocol::TaskRecord& task = memory_.slot[pending_];
    const bool counts = is_gate_up(task.kind) && lane() == 0;
    hidden_count_ = counts ? hidden_counter(call_, is_shared(task.kind), task.tile) : nullptr;
    __syncwarp();
    if (lane() == 0) ptx::arrive(ptx::shared_address(&memory_.slot_free[pending_]));
    pending_ = -1;
  }

  /// Counts on h of the last gate-up tile, if that is still to be done: the stores are waited for.
  __device__ __forceinline__ void count_hidden() {
    if (hidden_count_ == nullptr) return;
    ptx::wait_bulk_stores_done();
    ptx::fence_proxy_async();
    ptx::add_release_gpu(hidden_count_, 1);
    hidden_count_ = nullptr;
  }

  __device__ __forceinline__ void flush() {
    piece<0>(), piece<1>(), piece<2>(), piece<3>();
    piece<4>(), piece<5>(), piece<6>(), piece<7>();
    end_pieces();
    count_hidden();
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x - kProducerThreads) / kWarp; }
  __device__ __forceinline__ std::uint32_t staging() const { return ptx::shared_address(memory_.staging[warp()]); }
  __device__ __forceinline__ float clamp_of(std::int32_t kind) const {
    return is_shared(kind) ? call_.params.shared_clamp : call_.params.clamp;
  }

  __device__ __forceinline__ char* hidden_destination(const protocol::TaskRecord& task) const {
    return reinterpret_cast<char*>(hidden_tile(call_, is_shared(task.kind), task.hidden_place)) +
           std::int64_t{task.column} * 2 * kABytes + warp() * kHiddenChunkBytes;
  }
  __device__ __forceinline__ char* row_destination(const protocol::TaskRecord& task) const {
    const int row = warp() * kWarpRows + lane();
    if (lane() >= kWarpRows || row >= task.rows) return nullptr;
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
  __device__ __forceinline__ void gate_up_piece(const protocol::TaskRecord& task) {
    if constexpr (kPiece == 0) wait_for_staging();
    const float clamp = clamp_of(task.kind);
    const std::int64_t width =
        is_shared(task.kind) ? call_.geometry().shared_intermediate : call_.geometry().intermediate;
    const std::int64_t first_column = std::int64_t{task.column} * protocol::kGateUpColumns + 16 * kPiece;
    std::uint32_t hidden[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * kPiece + i;  // packed[2 j + half], j = 2 kPiece + i / 2
      const bool inside = first_column + i / 2 * 8 < width;
      hidden[i] = inside ? swiglu_pair(packed_[at], packed_[at + kPacked / 2], clamp) : 0;
    }
    const int row = lane() % 16;
    const int group = 2 * (kPiece % 4) + lane() / 16;  // of 8 columns, in its 64
    ptx::store_matrices(staging() + static_cast<std::uint32_t>((kPiece / 4) * kHiddenChunkBytes +
                                                               row * kOperandRowBytes + (group ^ (row % 8)) * 16),
                        hidden[0], hidden[1], hidden[2], hidden[3]);
    if constexpr (kPiece == kPieces - 1) {
      end_staging();
      if (lane() == 0) {
        ptx::bulk_store(destination_, staging(), kHiddenChunkBytes);
        ptx::bulk_store(destination_ + kABytes, staging() + kHiddenChunkBytes, kHiddenChunkBytes);
        ptx::commit_bulk_stores();
      }
    }
  }

  // 64 columns of eight rows.
  template <int kPiece>
  __device__ __forceinline__ void down_piece(const protocol::TaskRecord& task) {
    constexpr int kHalf = kPiece / 4;
    if constexpr (kPiece % 4 == 0) wait_for_staging();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first_group = 8 * (kPiece % 4) + 4 * i;
      ptx::store_matrices(
          staging() + static_cast<std::uint32_t>((lane() % 8) * kStagingPitch + (first_group + lane() / 8) * 16),
          packed_[2 * first_group + kHalf], packed_[2 * first_group + 2 + kHalf], packed_[2 * first_group + 4 + kHalf],
          packed_[2 * first_group + 6 + kHalf]);
    }
    if constexpr (kPiece % 4 == 3) {
      end_staging();
      if (lane() / 8 == kHalf && destination_ != nullptr) {
        const std::int64_t columns = call_.geometry().hidden - std::int64_t{task.column} * protocol::kDownColumns;
        ptx::bulk_store(destination_, staging() + static_cast<std::uint32_t>((lane() % 8) * kStagingPitch),
                        static_cast<std::uint32_t>(protocol::min64(columns, protocol::kDownColumns)) * 2);
        ptx::commit_bulk_stores();
      }
    }
  }

  const Call call_;
  BlockMemory& memory_;
  std::int32_t pending_ = -1;              // the slot whose pieces are to be done, -1: none
  char* destination_ = nullptr;            // of this lane's part of it
  std::uint32_t* hidden_count_ = nullptr;  // of the gate-up tile that is to be counted
  std::uint32_t packed_[kPacked];
};

}  // namespace moewave::sm90
