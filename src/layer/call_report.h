// What a rank did in a call, read off its schedule.
#pragma once

#include <cstdint>

#include "moewave/host_layer.h"
#include "protocol/geometry.h"
#include "protocol/schedule.h"

namespace moewave {

/// A report of the right sizes, all zeros, without entries for the ranks.
CallReport empty_call_report(const protocol::Geometry& geometry, bool backward);

/// One rank's view of a call that is over. Pointers are to host memory.
struct ReportSource {
  const protocol::Geometry& geometry;
  int rank = 0;
  bool backward = false;
  std::int64_t tokens = 0;
  const std::int32_t* ids = nullptr;  // [tokens, topk], staged
  protocol::Schedule schedule;
};

/// Everything but the time. Adds the rank's traffic and rows to `report` when there is one; ranks may do so at the same
/// time.
RankStats describe_rank(const ReportSource& source, CallReport* report);

}  // namespace moewave
