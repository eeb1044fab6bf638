// The commands of the program. Each returns the exit code, or throws.
#pragma once

#include <string>

#include "options.h"

namespace moewave::cli {

inline constexpr int kSuccess = 0;
inline constexpr int kFailed = 1;
inline constexpr int kBadInput = 2;

/// Runs the layer and writes what was asked for; with `verify` also compares with the FP64 reference.
int run_command(const RunOptions& options, bool verify);

int info_command(const std::string& json_path);

/// The one line on stderr that every failure ends in.
void print_error(const std::string& message);

}  // namespace moewave::cli
