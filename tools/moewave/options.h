// What the user asked for, checked as far as that is possible without reading a file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moewave/config.h"

namespace moewave::cli {

enum class Backend { kReference, kEmulator, kCuda };
const char* name_of(Backend backend);

struct RunOptions {
  std::optional<Backend> asked_backend;
  Backend backend = Backend::kEmulator;  ///< in use: asked for, else cuda where it can run what is asked, else emulator

  // Sizes. Absent: taken from the files, else a default.
  std::optional<std::int64_t> ranks, hidden, intermediate, experts, topk, shared_intermediate;
  std::optional<float> clamp, shared_clamp;
  std::vector<std::int64_t> tokens;  ///< empty: absent; one value: of every rank

  std::string routing;  ///< empty: "file" with an inputs file, else "uniform"
  std::uint64_t seed = 1;
  bool backward = false;

  // Files. Empty: absent.
  std::string weights, layer, inputs, output, json, timeline;

  Tuning tuning;
  std::int64_t jitter_us = 0;
  bool poison = false;
  std::int64_t saved_rows = -1;  ///< -1: all

  bool json_to_stdout() const { return json == "-"; }
};

/// Of the command bench. Of `run` it has sizes, routing, inputs, seed, tuning and json.
struct BenchOptions {
  RunOptions run;
  std::string preset;                            ///< "A", "B", "C"; empty: none
  std::optional<std::int64_t> experts_per_rank;  ///< of the preset, unless experts are given
  std::int64_t warmup = 5;
  std::int64_t iterations = 20;
};

enum class Command { kRun, kVerify, kBench, kInfo };

struct CommandLine {
  Command command = Command::kInfo;
  RunOptions run;         ///< of run and verify
  BenchOptions bench;     ///< of bench
  std::string info_json;  ///< of info
};

/// Returns nothing when help or the version was asked for and printed. Throws InputError for anything that is not
/// allowed.
std::optional<CommandLine> parse_command_line(int argc, const char* const* argv);

}  // namespace moewave::cli
