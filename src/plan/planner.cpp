#include "plan/planner.h"

#include <algorithm>
#include <limits>
#include <string>

#include "layer/plural.h"
#include "moewave/error.h"

namespace moewave::plan {
namespace {

using protocol::ceil_div;
using protocol::kOrderBlockTokens;
using protocol::kTileRows;
using protocol::round_up;

// Routes and rows have 32-bit numbers.
constexpr std::int64_t kMostRoutes = std::numeric_limits<std::int32_t>::max();

// A group of row tiles: half of an H200's L2, where it is neither too short to share weights nor longer than needed.
constexpr std::int64_t kRasterBytes = 32 << 20;
constexpr std::int64_t kLeastRasterTiles = 8;
constexpr std::int64_t kMostRasterTiles = 64;

std::int64_t all_remote_tokens(int ranks, std::int64_t max_tokens) {
  return round_up((ranks - 1) * max_tokens, kOrderBlockTokens);
}

std::int64_t all_rows(const LayerShape& shape, int ranks, std::int64_t max_tokens) {
  return round_up(std::max<std::int64_t>(ranks * max_tokens * shape.topk, 1), kTileRows);
}

// A segment must hold the rows of one block of the token order.
std::int64_t smallest_segment_rows(const LayerShape& shape) {
  return round_up(kOrderBlockTokens * shape.topk, kTileRows);
}

// Half of what was asked for, in whole units; everything where nothing was asked for or half of it suffices.
std::int64_t half_of_ring(std::int64_t asked, std::int64_t everything, std::int64_t unit) {
  if (asked == 0 || asked >= 2 * everything) return everything;
  return std::min(everything, round_up(ceil_div(asked, 2), unit));
}

void require_int32(std::int64_t value, const char* what) {
  if (value > std::numeric_limits<std::int32_t>::max()) {
    throw InputError(std::string(what) + " is " + std::to_string(value) +
                     "; it must be below 2147483648: use fewer tokens per rank, or a larger ring");
  }
}

}  // namespace

std::int64_t two_wave_rows(std::int64_t sms, std::int64_t tile_rows, std::int64_t tasks_per_tile) {
  return ceil_div(2 * sms * tile_rows, tasks_per_tile);
}

Tuning choose_gpu_sms(const Tuning& tuning, int ranks, int available) {
  validate(tuning);
  if (available < 2) {
    throw InputError("a rank has " + plural(available, "SM") +
                     " of its GPU; it needs at least 2: put fewer ranks on a GPU");
  }
  if (tuning.sms > available) {
    throw InputError("sms is " + std::to_string(tuning.sms) + "; a rank has " + plural(available, "SM") +
                     " of its GPU, so it must be 2 to " + std::to_string(available));
  }
  Tuning chosen = tuning;
  if (chosen.sms == 0) chosen.sms = available;
  if (chosen.comm_sms == 0) chosen.comm_sms = ranks > 1 ? std::min(kGpuCommSms, chosen.sms - 1) : 1;
  return chosen;
}

Tuning resolve_tuning(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning) {
  validate(shape, ranks);
  validate(tuning);
  const std::int64_t most_tokens = kMostRoutes / (ranks * shape.topk);
  if (max_tokens < 0 || max_tokens > most_tokens) {
    throw InputError("max_tokens is " + std::to_string(max_tokens) + "; with " + plural(ranks, "rank") + " and topk " +
                     std::to_string(shape.topk) + " it must be 0 to " + std::to_string(most_tokens));
  }
  Tuning resolved = tuning;
  if (resolved.sms == 0) resolved.sms = std::max(kEmulatorSms, resolved.comm_sms + 1);
  if (resolved.comm_sms == 0) resolved.comm_sms = std::max(1, resolved.sms / 4);
  if (resolved.comm_sms >= resolved.sms) {
    throw InputError("comm_sms is " + std::to_string(resolved.comm_sms) + " of " + std::to_string(resolved.sms) +
                     " sms; it must be at least 1 and below sms");
  }
  if (resolved.minibatch_rows == 0) {
    const std::int64_t tasks = std::min(ceil_div(shape.intermediate, protocol::kGateUpColumns),
                                        ceil_div(shape.hidden, protocol::kDownColumns));
    resolved.minibatch_rows = two_wave_rows(resolved.sms - resolved.comm_sms, kTileRows, tasks);
  }
  // A minibatch is cut where a macrobatch ends, so nothing is lost by bounding it by all rows there can be.
  const std::int64_t padded_rows = all_rows(shape, ranks, max_tokens) + shape.experts * kTileRows;
  resolved.minibatch_rows = round_up(std::min(resolved.minibatch_rows, padded_rows), kTileRows);

  const std::int64_t every_token = all_remote_tokens(ranks, max_tokens);
  const std::int64_t every_row = all_rows(shape, ranks, max_tokens);
  const std::int64_t segment_rows = std::min(
      every_row, std::max(half_of_ring(resolved.ring_rows, every_row, kTileRows), smallest_segment_rows(shape)));
  // A segment needs no more token copies than it has rows.
  const std::int64_t segment_tokens = std::min(half_of_ring(resolved.ring_tokens, every_token, kOrderBlockTokens),
                                               round_up(segment_rows, kOrderBlockTokens));
  const bool holds_everything = 2 * segment_tokens >= every_token && 2 * segment_rows >= every_row;
  resolved.ring_tokens = holds_everything ? every_token : 2 * segment_tokens;
  resolved.ring_rows = holds_everything ? every_row : 2 * segment_rows;
  return resolved;
}

protocol::Geometry make_geometry(const LayerShape& shape, int ranks, std::int64_t max_tokens, const Tuning& tuning,
                                 std::int64_t saved_rows) {
  protocol::Geometry geometry;
  geometry.ranks = ranks;
  geometry.experts = static_cast<std::int32_t>(shape.experts);
  geometry.topk = static_cast<std::int32_t>(shape.topk);
  geometry.hidden = shape.hidden;
  geometry.intermediate = shape.intermediate;
  geometry.shared_intermediate = shape.shared_intermediate;
  geometry.max_tokens = max_tokens;
  geometry.minibatch_tiles = static_cast<std::int32_t>(tuning.minibatch_rows / kTileRows);
  geometry.interleave_tasks = tuning.sms;
  // The tokens of a group of tiles shall stay in the L2 while its column blocks pass.
  geometry.raster_tiles = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(kRasterBytes / (kTileRows * shape.hidden * 2), kLeastRasterTiles, kMostRasterTiles));
  const bool one_segment = tuning.ring_tokens == all_remote_tokens(ranks, max_tokens) &&
                           tuning.ring_rows == all_rows(shape, ranks, max_tokens);
  geometry.segments = one_segment ? 1 : 2;
  geometry.segment_tokens = tuning.ring_tokens / geometry.segments;
  geometry.segment_rows = tuning.ring_rows / geometry.segments;
  require_int32(geometry.max_tiles() * kTileRows, "the number of padded rows");
  require_int32(geometry.segments * geometry.segment_tokens, "the token ring");
  const std::int64_t every_row = geometry.max_tiles() * kTileRows;
  geometry.saved_rows = saved_rows < 0 ? every_row : std::min(round_up(saved_rows, kTileRows), every_row);
  return geometry;
}

}  // namespace moewave::plan
