// A group of lanes that works through one list together: a warp on the GPU, a single lane on the CPU. The protocol's
// loops are written once against this interface; with one lane every operation below is trivial.
//
//   id(), width()            this lane and how many there are
//   match(key, active)       which active lanes hold the same key: rank among them in lane order, count, is_first
//   exclusive_sum(v, total)  prefix sum over the lanes
//   first_true(flag)         lowest lane whose flag is set, width() if none
//   broadcast(v, lane)       the value of one lane
//   sync()                   memory written by one lane before is seen by the others after
#pragma once

#include <cstdint>

#include "moewave/host_device.h"

namespace moewave::protocol {

struct Match {
  int rank = 0;
  int count = 1;
  bool is_first = true;
};

struct SingleLane {
  MOEWAVE_HD static constexpr int id() { return 0; }
  MOEWAVE_HD static constexpr int width() { return 1; }
  MOEWAVE_HD static Match match(int /*key*/, bool /*active*/) { return {}; }
  MOEWAVE_HD static std::int64_t exclusive_sum(std::int64_t value, std::int64_t& total) {
    total = value;
    return 0;
  }
  MOEWAVE_HD static int first_true(bool flag) { return flag ? 0 : 1; }
  template <typename T>
  MOEWAVE_HD static T broadcast(T value, int /*lane*/) {
    return value;
  }
  MOEWAVE_HD static void sync() {}
};

#if defined(__CUDACC__)
struct WarpLanes {
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ static int id() { return static_cast<int>(threadIdx.x & 31u); }
  __device__ static constexpr int width() { return 32; }
  __device__ static Match match(int key, bool active) {
    const unsigned same = __match_any_sync(kAll, active ? key : -1 - id());
    const unsigned before = same & ((1u << id()) - 1u);
    return {__popc(before), __popc(same), before == 0u};
  }
  __device__ static std::int64_t exclusive_sum(std::int64_t value, std::int64_t& total) {
    std::int64_t sum = value;
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(kAll, sum, step);
      if (id() >= step) sum += other;
    }
    total = __shfl_sync(kAll, sum, 31);
    return sum - value;
  }
  __device__ static int first_true(bool flag) {
    const unsigned set = __ballot_sync(kAll, flag);
    return set == 0u ? 32 : __ffs(static_cast<int>(set)) - 1;
  }
  template <typename T>
  __device__ static T broadcast(T value, int lane) {
    return __shfl_sync(kAll, value, lane);
  }
  __device__ static void sync() { __syncwarp(); }
};
#endif

}  // namespace moewave::protocol
