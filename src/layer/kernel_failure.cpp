#include "layer/kernel_failure.h"

#include <string>

#include "layer/plural.h"
#include "protocol/entry.h"

namespace moewave {
namespace {

template <typename Enum, std::size_t kCount>
std::string name_of(const char* const (&names)[kCount], Enum value) {
  static_assert(kCount == static_cast<std::size_t>(Enum::kCount));
  const auto index = static_cast<std::size_t>(value);
  return index < kCount ? names[index] : "unknown (" + std::to_string(index) + ")";
}

}  // namespace

WaitRecord wait_record(int rank, const sm90::StopRecord& stop) {
  const std::string awaited = name_of(sm90::kAwaitedNames, stop.awaited);
  WaitRecord record;
  record.rank = rank;
  record.sm = static_cast<int>(stop.block);
  record.role = name_of(sm90::kRoleNames, stop.role);
  record.phase = awaited;
  record.waiting_for = awaited + "[" + std::to_string(stop.number) + "]";
  record.wanted = stop.wanted;
  record.seen = stop.seen;
  return record;
}

void throw_timeout(const WaitRecord& r) {
  throw TimeoutError("rank " + std::to_string(r.rank) + ", SM " + std::to_string(r.sm) + " (" + r.role +
                         ") waited too long for " + r.waiting_for + ": wanted " + std::to_string(r.wanted) + ", saw " +
                         std::to_string(r.seen),
                     r);
}

void throw_verdict(const sm90::HostWords& words, const protocol::Geometry& geometry) {
  if (words.has_verdict == 0) return;
  const std::string rank = std::to_string(words.verdict_rank);
  if (words.verdict == static_cast<std::uint32_t>(protocol::EntryVerdict::kRefused)) {
    throw InputError("rank " + rank + " has " + plural(words.verdict_tokens, "token") + "; this layer takes at most " +
                     std::to_string(geometry.max_tokens) + " a rank (epoch " + std::to_string(words.verdict_epoch) +
                     ")");
  }
  throw Error("rank " + rank + " and rank 0 disagree on epoch, direction or configuration (epoch " +
              std::to_string(words.verdict_epoch) + ")");
}

void throw_bad_route(const sm90::HostWords& words, const protocol::Geometry& geometry) {
  if (words.has_bad_route == 0) return;
  const std::int64_t routes = geometry.max_tokens * geometry.topk;
  const std::int64_t route = words.bad_route % routes;
  throw InputError("topk_ids of rank " + std::to_string(words.bad_route / routes) + ", token " +
                   std::to_string(route / geometry.topk) + ", slot " + std::to_string(route % geometry.topk) +
                   " is out of range; it must be -1 to " + std::to_string(geometry.experts - 1) + " (epoch " +
                   std::to_string(words.bad_route_epoch) + ")");
}

}  // namespace moewave
