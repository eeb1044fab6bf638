// The emulator's timeline as a trace in Chrome's format, which https://ui.perfetto.dev opens: ranks are processes, SMs
// threads.
#pragma once

#include <string>
#include <vector>

#include "moewave/host_layer.h"

namespace moewave::cli {

std::string timeline_json(const std::vector<TimelineEvent>& events, const std::vector<CallReport>& calls,
                          const std::string& backend);

}  // namespace moewave::cli
