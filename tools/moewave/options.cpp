#include "options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>

#include "moewave/error.h"
#include "moewave/version.h"
#include "numbers.h"

namespace moewave::cli {

namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kIntLimit = std::numeric_limits<int>::max();

// An option with one value. The value is parsed by `take`, and only the last one when the option is given several
// times.
CLI::Option* add_value(CLI::App& app, const std::string& name, const std::string& type, const std::string& description,
                       std::function<void(const std::string& text)> take) {
  return app.add_option_function<std::string>(name, std::move(take), description)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->allow_extra_args(false)
      ->type_name(type);
}

// Zero is the same as absent: the size comes from the files, else from the default.
void add_size(CLI::App& app, const std::string& name, const std::string& type, const std::string& description,
              std::int64_t max, std::optional<std::int64_t>& size) {
  add_value(app, name, type, description, [name, max, &size](const std::string& text) {
    const std::int64_t value = parse_count(name, text, 0, max);
    size = value == 0 ? std::nullopt : std::optional(value);
  });
}

template <typename T>
void add_tuning(CLI::App& app, const std::string& name, const std::string& description, T& target) {
  constexpr std::int64_t max = sizeof(T) == sizeof(int) ? kIntLimit : kNoLimit;
  add_value(app, name, "N", description,
            [name, &target](const std::string& text) { target = static_cast<T>(parse_count(name, text, 0, max)); });
}

// A name that starts with a dash is a forgotten value (`--output --backward`), not a file.
void add_file(CLI::App& app, const std::string& name, const std::string& type, const std::string& description,
              std::string& path, bool dash_is_stdout = false) {
  add_value(app, name, type, description, [name, dash_is_stdout, &path](const std::string& text) {
    if (text.empty() || (text[0] == '-' && !(dash_is_stdout && text == "-"))) {
      throw InputError(fmt::format("{} '{}' is not a file name; allowed are names that do not start with '-'{}", name,
                                   text, dash_is_stdout ? ", and - for stdout" : ""));
    }
    path = text;
  });
}

Backend parse_backend(const std::string& text) {
  if (text == "reference") return Backend::kReference;
  if (text == "emulator") return Backend::kEmulator;
  if (text == "cuda") {
    throw InputError("--backend cuda: this build has no CUDA backend yet; allowed are reference, emulator");
  }
  throw InputError(fmt::format("--backend '{}' is unknown; allowed are reference, emulator", text));
}

void add_layer_options(CLI::App& app, RunOptions& options) {
  add_size(app, "--ranks", "N",
           "ranks of expert parallelism (default: as many as --tokens or the inputs file name, else 1)", kMaxRanks,
           options.ranks);
  add_value(app, "--tokens", "T|T0,T1,..",
            "tokens of every rank, or of each rank (default: split of the inputs, else 64)",
            [&options](const std::string& text) { options.tokens = parse_counts("--tokens", text); });
  add_size(app, "--hidden", "H", "hidden size, a multiple of 8 (default 256)", kNoLimit, options.hidden);
  add_size(app, "--intermediate", "I", "width of an expert, a multiple of 8 (default 512)", kNoLimit,
           options.intermediate);
  add_size(app, "--experts", "E", "experts of all ranks together, 1 to 4096 (default 8)", kNoLimit, options.experts);
  add_size(app, "--topk", "K", "experts a token, 1 to min(64, E) (default 2)", kNoLimit, options.topk);
  add_value(app, "--shared-intermediate", "S", "width of the shared expert, a multiple of 8; 0: none",
            [&options](const std::string& text) {
              options.shared_intermediate = parse_count("--shared-intermediate", text, 0, kNoLimit);
            });
  add_value(app, "--clamp", "C", "bound of gate and up of the routed experts (default: none)",
            [&options](const std::string& text) { options.clamp = parse_positive_float("--clamp", text); });
  add_value(app, "--shared-clamp", "C", "the same of the shared expert", [&options](const std::string& text) {
    options.shared_clamp = parse_positive_float("--shared-clamp", text);
  });
  add_value(app, "--dtype", "NAME", "type of weights and activations: bf16", [](const std::string& text) {
    if (text != "bf16") throw InputError(fmt::format("--dtype '{}' is not supported; allowed is bf16", text));
  });
  app.add_flag("--backward", options.backward, "forward and backward")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void add_data_options(CLI::App& app, RunOptions& options) {
  add_file(app, "--weights", "FILE", "weights, .safetensors or .safetensors.index.json (default: random)",
           options.weights);
  add_value(app, "--layer", "PREFIX", "the layer in the weights file, for instance model.layers.3.mlp",
            [&options](const std::string& text) { options.layer = text; });
  add_file(app, "--inputs", "FILE", "tokens and routes, .safetensors (default: random)", options.inputs);
  add_value(app, "--routing", "HOW", "uniform, zipf:S, single:E or file (default: file with --inputs, else uniform)",
            [&options](const std::string& text) {
              if (text.empty())
                throw InputError("--routing '' is unknown; allowed are uniform, zipf:S, single:E, file");
              options.routing = text;
            });
  add_value(app, "--seed", "N", "of everything random (default 1)",
            [&options](const std::string& text) { options.seed = parse_seed("--seed", text); });
  add_file(app, "--output", "FILE", "results, .safetensors", options.output);
  add_file(app, "--json", "FILE|-", "machine-readable result; - is stdout, tables then go nowhere", options.json, true);
  add_file(app, "--timeline", "FILE", "what the emulator did when, as a trace that Perfetto opens", options.timeline);
}

void add_execution_options(CLI::App& app, RunOptions& options) {
  add_value(app, "--backend", "NAME", "reference or emulator (default emulator)",
            [&options](const std::string& text) { options.backend = parse_backend(text); });
  add_tuning(app, "--minibatch", "rows handed to compute at a time, rounded up to tiles (0: chosen)",
             options.tuning.minibatch_rows);
  add_tuning(app, "--ring", "token copies a rank can hold, rounded up (0: chosen)", options.tuning.ring_tokens);
  add_tuning(app, "--sms", "SMs a rank takes; emulator: threads (0: chosen)", options.tuning.sms);
  add_tuning(app, "--comm-sms", "how many of them communicate, fewer than --sms (0: chosen)", options.tuning.comm_sms);
  add_tuning(app, "--saved-rows", "rows a rank saves for backward, the rest is recomputed (default: all)",
             options.saved_rows);
  add_tuning(app, "--jitter-us", "emulator: random delays up to N microseconds before phases and tasks",
             options.jitter_us);
  app.add_flag("--poison", options.poison, "emulator: fill scratch memory with NaN before each call")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

// Gives a heading to all options added since the last call.
void set_group(CLI::App& app, const std::string& heading) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_group() == "Options" && option != app.get_help_ptr()) option->group(heading);
  }
}

void check_combinations(const RunOptions& options) {
  if (!options.layer.empty() && options.weights.empty()) {
    throw InputError(fmt::format("--layer '{}' needs --weights", options.layer));
  }
  if (options.routing == "file" && options.inputs.empty()) {
    throw InputError("--routing file needs --inputs; without it allowed are uniform, zipf:S, single:E");
  }
  if (options.backend == Backend::kEmulator) return;
  const char* unusable = !options.timeline.empty() ? "--timeline"
                         : options.jitter_us > 0   ? "--jitter-us"
                         : options.poison          ? "--poison"
                         : options.saved_rows >= 0 ? "--saved-rows"
                                                   : nullptr;
  if (unusable != nullptr) {
    throw InputError(
        fmt::format("{} works with --backend emulator only, not with {}", unusable, name_of(options.backend)));
  }
}

CLI::App* add_run_command(CLI::App& app, const std::string& name, const std::string& description, RunOptions& options) {
  CLI::App* command = app.add_subcommand(name, description)->group("Commands");
  add_layer_options(*command, options);
  set_group(*command, "Layer");
  add_data_options(*command, options);
  set_group(*command, "Data");
  add_execution_options(*command, options);
  set_group(*command, "Execution");
  return command;
}

}  // namespace

const char* name_of(Backend backend) { return backend == Backend::kReference ? "reference" : "emulator"; }

std::optional<CommandLine> parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  CLI::App app("One Mixture-of-Experts layer, forward and backward, under expert parallelism.", "moewave");
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.set_version_flag("--version", fmt::format("moewave {}", kVersion));
  const CLI::App* run = add_run_command(app, "run", "compute the layer and write the results", line.run);
  const CLI::App* verify =
      add_run_command(app, "verify", "run, then compare every result with the FP64 reference", line.run);
  CLI::App* info = app.add_subcommand("info", "print version, build, devices, backends and limits")->group("Commands");
  add_file(*info, "--json", "FILE|-", "the same, machine-readable; - is stdout", line.info_json, true);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      app.exit(error);
      return std::nullopt;
    }
    throw InputError(fmt::format("{} (moewave --help lists what is allowed)", error.what()));
  }
  // A command is listed once however often it was given.
  const auto chosen = app.get_subcommands();
  if (chosen.size() != 1 || chosen[0]->count() != 1) {
    throw InputError("one command is needed; allowed are run, verify, info (see moewave --help)");
  }
  line.command = chosen[0] == run ? Command::kRun : chosen[0] == verify ? Command::kVerify : Command::kInfo;
  if (line.command != Command::kInfo) check_combinations(line.run);
  return line;
}

}  // namespace moewave::cli
