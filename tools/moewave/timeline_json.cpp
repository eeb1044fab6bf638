#include "timeline_json.h"

#include <fmt/format.h>

#include <iterator>
#include <set>
#include <utility>

namespace moewave::cli {

namespace {

// The second track of an SM is a thread of its own, after all SMs: what lies in one thread must not overlap.
constexpr std::int32_t kSecondTrack = 10'000;

std::int32_t thread_of(const TimelineEvent& event) { return event.sm + event.track * kSecondTrack; }

// Names are the library's own identifiers: nothing in them needs an escape.
void append_names(fmt::memory_buffer& text, const std::vector<TimelineEvent>& events) {
  std::set<std::int32_t> ranks;
  std::set<std::pair<std::int32_t, std::int32_t>> threads;
  for (const TimelineEvent& event : events) {
    ranks.insert(event.rank);
    threads.emplace(event.rank, thread_of(event));
  }
  auto out = std::back_inserter(text);
  for (const std::int32_t rank : ranks) {
    fmt::format_to(out, R"({{"ph":"M","name":"process_name","pid":{0},"args":{{"name":"rank {0}"}}}},)", rank);
    fmt::format_to(out, "\n");
    fmt::format_to(out, R"({{"ph":"M","name":"process_sort_index","pid":{0},"args":{{"sort_index":{0}}}}},)", rank);
    fmt::format_to(out, "\n");
  }
  for (const auto& [rank, thread] : threads) {
    fmt::format_to(out, R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"SM {}{}"}}}},)", rank,
                   thread, thread % kSecondTrack, thread < kSecondTrack ? "" : " producer");
    fmt::format_to(out, "\n");
    fmt::format_to(out, R"({{"ph":"M","name":"thread_sort_index","pid":{0},"tid":{1},"args":{{"sort_index":{1}}}}},)",
                   rank, thread);
    fmt::format_to(out, "\n");
  }
}

}  // namespace

std::string timeline_json(const std::vector<TimelineEvent>& events, const std::vector<CallReport>& calls,
                          const std::string& backend) {
  fmt::memory_buffer text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
  append_names(text, events);
  for (const TimelineEvent& event : events) {
    const bool backward = calls[static_cast<std::size_t>(event.call)].backward;
    fmt::format_to(out, R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},)", event.name,
                   backward ? "backward" : "forward", event.rank, thread_of(event),
                   static_cast<double>(event.begin_ns) / 1e3, static_cast<double>(event.end_ns - event.begin_ns) / 1e3);
    fmt::format_to(out, R"("args":{{"call":{},"index":{},"minibatch":{}}}}},)", event.call, event.index,
                   event.minibatch);
    fmt::format_to(out, "\n");
  }
  // A last metadata event without a comma after it.
  fmt::format_to(out, R"({{"ph":"M","name":"trace_title","pid":0,"args":{{"name":"moewave {}"}}}})", backend);
  fmt::format_to(out, "\n]}}\n");
  return fmt::to_string(text);
}

}  // namespace moewave::cli
