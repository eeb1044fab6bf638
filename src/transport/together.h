// One failure is everybody's: work that all processes do and that fails on all of them if it fails on one.
#pragma once

#include <functional>

#include "moewave/process_group.h"

namespace moewave {

/// Runs `work`, then learns from all processes whether theirs succeeded. If any failed, every process throws: its own
/// exception where it has one, else that of the first process that failed, with the same type (InputError or Error).
void together(ProcessGroup& group, const std::function<void()>& work);

}  // namespace moewave
