#include "options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>

#include "gpus.h"
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
void add_tuning(CLI::App& app, const std::string& name, const std::string& description, T& target,
                std::int64_t max = sizeof(T) == sizeof(int) ? kIntLimit : kNoLimit) {
  add_value(app, name, "N", description, [name, max, &target](const std::string& text) {
    target = static_cast<T>(parse_count(name, text, 0, max));
  });
}

// An option without a value, or with one behind "=": --name, --name=true, --name=false.
void add_switch(CLI::App& app, const std::string& name, const std::string& description, bool& target) {
  const auto take = [name, &target](const std::string& text) {
    if (text != "true" && text != "false") {
      throw InputError(
          fmt::format("{} '{}' is not allowed; allowed are {}, {}=true, {}=false", name, text, name, name, name));
    }
    target = text == "true";
  };
  add_value(app, name, "", description, take)->expected(0);
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
  for (const Backend backend : {Backend::kReference, Backend::kEmulator, Backend::kCuda}) {
    if (text == name_of(backend)) return backend;
  }
  throw InputError(fmt::format("--backend '{}' is unknown; allowed are reference, emulator, cuda", text));
}

// What the help says where nothing is given.
struct LayerDefaults {
  const char* ranks;
  const char* tokens;
  const char* hidden;
  const char* intermediate;
  const char* experts;
  const char* topk;
};
constexpr LayerDefaults kRunDefaults = {"as many as --tokens or the inputs file name, else cuda: the GPUs, emulator: 1",
                                        "split of the inputs, else 64",
                                        "256",
                                        "512",
                                        "8, more if --topk or the ids of --inputs need it",
                                        "2"};
constexpr LayerDefaults kBenchDefaults = {
    "as many as --tokens names, else the GPUs", "4096", "2048", "768", "16 a rank", "8"};

void add_layer_options(CLI::App& app, RunOptions& options, const LayerDefaults& defaults) {
  const auto text = [](const char* what, const char* fallback) {
    return fmt::format("{} (default: {})", what, fallback);
  };
  add_size(app, "--ranks", "N", text("ranks of expert parallelism", defaults.ranks), kMaxRanks, options.ranks);
  add_value(app, "--tokens", "T|T0,T1,..", text("tokens of every rank, or of each rank", defaults.tokens),
            [&options](const std::string& value) { options.tokens = parse_counts("--tokens", value); });
  add_size(app, "--hidden", "H", text("hidden size, a multiple of 8", defaults.hidden), kNoLimit, options.hidden);
  add_size(app, "--intermediate", "I", text("width of an expert, a multiple of 8", defaults.intermediate), kNoLimit,
           options.intermediate);
  add_size(app, "--experts", "E", text("experts of all ranks together, 1 to 4096", defaults.experts), kNoLimit,
           options.experts);
  add_size(app, "--topk", "K", text("experts a token, 1 to min(64, E)", defaults.topk), kNoLimit, options.topk);
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
}

void add_backward(CLI::App& app, RunOptions& options) {
  add_switch(app, "--backward", "forward and backward", options.backward);
}

void add_routing(CLI::App& app, RunOptions& options) {
  add_value(app, "--routing", "HOW", "uniform, zipf:S, single:E or file (default: file with --inputs, else uniform)",
            [&options](const std::string& text) {
              if (text.empty())
                throw InputError("--routing '' is unknown; allowed are uniform, zipf:S, single:E, file");
              options.routing = text;
            });
  add_value(app, "--seed", "N", "of everything random (default 1)",
            [&options](const std::string& text) { options.seed = parse_seed("--seed", text); });
}

void add_json(CLI::App& app, RunOptions& options) {
  add_file(app, "--json", "FILE|-", "machine-readable result; - is stdout, tables then go nowhere", options.json, true);
}

void add_data_options(CLI::App& app, RunOptions& options) {
  add_file(app, "--weights", "FILE", "weights, .safetensors or .safetensors.index.json (default: random)",
           options.weights);
  add_value(app, "--layer", "PREFIX", "the layer in the weights file, for instance model.layers.3.mlp",
            [&options](const std::string& text) { options.layer = text; });
  add_file(app, "--inputs", "FILE", "tokens and routes, .safetensors (default: random)", options.inputs);
  add_routing(app, options);
  add_file(app, "--output", "FILE", "results, .safetensors", options.output);
  add_json(app, options);
  add_file(app, "--timeline", "FILE", "what each SM did when, as a trace that Perfetto opens", options.timeline);
}

void add_tuning_options(CLI::App& app, RunOptions& options) {
  add_tuning(app, "--minibatch", "rows handed to compute at a time, rounded up to tiles (0: chosen)",
             options.tuning.minibatch_rows);
  add_tuning(app, "--ring", "token copies a rank can hold, rounded up (0: chosen)", options.tuning.ring_tokens);
  add_tuning(app, "--sms", "SMs a rank takes; emulator: threads (0: chosen)", options.tuning.sms);
  add_tuning(app, "--comm-sms", "how many of them communicate, fewer than --sms (0: chosen)", options.tuning.comm_sms);
}

void add_execution_options(CLI::App& app, RunOptions& options) {
  add_value(app, "--backend", "NAME",
            "reference, emulator or cuda (default: cuda if it can run what is asked, else emulator)",
            [&options](const std::string& text) { options.asked_backend = parse_backend(text); });
  add_tuning_options(app, options);
  add_tuning(app, "--saved-rows", "emulator: rows a rank saves for backward, the rest is recomputed (default: all)",
             options.saved_rows);
  constexpr std::int64_t kMostJitterUs = 1'000'000;
  add_tuning(app, "--jitter-us",
             "emulator, cuda: random delays up to N microseconds before phases and tasks, at most 1000000",
             options.jitter_us, kMostJitterUs);
  add_switch(app, "--poison", "emulator, cuda: fill scratch memory with NaN before each call", options.poison);
}

// The shapes that docs/bench.md reports on; sizes given besides win.
struct Preset {
  const char* name;
  std::int64_t hidden, intermediate, topk, tokens, experts_per_rank;
};
constexpr Preset kPresets[] = {
    {"A", 7168, 2048, 8, 8192, 32}, {"B", 4096, 1536, 8, 8192, 16}, {"C", 2048, 768, 8, 16384, 16}};

void add_preset(CLI::App& app, BenchOptions& options) {
  add_value(app, "--shape", "A|B|C", "sizes of a known layer: A is H 7168 I 2048, B H 4096 I 1536, C H 2048 I 768",
            [&options](const std::string& text) {
              for (const Preset& preset : kPresets) {
                if (text == preset.name) return void(options.preset = text);
              }
              throw InputError(fmt::format("--shape '{}' is unknown; allowed are A, B, C", text));
            });
}

void apply_preset(BenchOptions& options) {
  for (const Preset& preset : kPresets) {
    if (options.preset != preset.name) continue;
    RunOptions& run = options.run;
    if (!run.hidden) run.hidden = preset.hidden;
    if (!run.intermediate) run.intermediate = preset.intermediate;
    const bool routes_from_file = !run.inputs.empty();
    if (!run.topk && !routes_from_file) run.topk = preset.topk;
    if (run.tokens.empty()) run.tokens = {preset.tokens};
    if (!run.experts) options.experts_per_rank = preset.experts_per_rank;
  }
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
  const bool on_emulator = options.backend == Backend::kEmulator;
  const bool on_reference = options.backend == Backend::kReference;
  const char* unusable = on_reference && !options.timeline.empty() ? "--timeline"
                         : on_reference && options.jitter_us > 0   ? "--jitter-us"
                         : on_reference && options.poison          ? "--poison"
                         : !on_emulator && options.saved_rows >= 0 ? "--saved-rows"
                                                                   : nullptr;
  if (unusable != nullptr) {
    throw InputError(fmt::format("{} works with --backend emulator{}, not with {}", unusable,
                                 on_reference && options.saved_rows < 0 ? " or cuda" : " only",
                                 name_of(options.backend)));
  }
}

// The backend in use. GPUs are looked for only where they could be used.
void resolve_backend(RunOptions& options) {
  const bool needs_emulator = options.backward || options.saved_rows >= 0;
  if (!options.asked_backend) {
    options.backend = !needs_emulator && gpu_state().obstacle.empty() ? Backend::kCuda : Backend::kEmulator;
    return;
  }
  options.backend = *options.asked_backend;
  if (options.backend != Backend::kCuda) return;
  if (options.backward) {
    throw InputError(
        "--backward with --backend cuda: there is no backward kernel yet; allowed are reference, emulator");
  }
  if (!gpu_state().obstacle.empty()) {
    throw InputError(fmt::format("--backend cuda: {}; allowed are reference, emulator", gpu_state().obstacle));
  }
}

CLI::App* add_run_command(CLI::App& app, const std::string& name, const std::string& description, RunOptions& options) {
  CLI::App* command = app.add_subcommand(name, description)->group("Commands");
  add_layer_options(*command, options, kRunDefaults);
  add_backward(*command, options);
  set_group(*command, "Layer");
  add_data_options(*command, options);
  set_group(*command, "Data");
  add_execution_options(*command, options);
  set_group(*command, "Execution");
  return command;
}

CLI::App* add_bench_command(CLI::App& app, BenchOptions& options) {
  CLI::App* command =
      app.add_subcommand("bench", "time the layer on the GPUs, checking samples of the result")->group("Commands");
  add_preset(*command, options);
  add_layer_options(*command, options.run, kBenchDefaults);
  set_group(*command, "Layer");
  add_file(*command, "--inputs", "FILE", "routes, .safetensors, repeated as often as needed; its tokens are not used",
           options.run.inputs);
  add_routing(*command, options.run);
  add_json(*command, options.run);
  set_group(*command, "Data");
  add_tuning_options(*command, options.run);
  constexpr std::int64_t kMostIterations = 1'000'000;
  add_value(
      *command, "--warmup", "N", "calls before those that are timed (default 5)",
      [&options](const std::string& text) { options.warmup = parse_count("--warmup", text, 0, kMostIterations); });
  add_value(*command, "--iterations", "N", "calls that are timed (default 20)", [&options](const std::string& text) {
    options.iterations = parse_count("--iterations", text, 1, kMostIterations);
  });
  set_group(*command, "Execution");
  return command;
}

void check_bench(BenchOptions& options) {
  options.run.backend = Backend::kCuda;
  apply_preset(options);
  check_combinations(options.run);
  if (!options.run.inputs.empty() && !options.run.routing.empty() && options.run.routing != "file") {
    throw InputError(fmt::format("--inputs {} has no use with --routing {}; allowed is --routing file",
                                 options.run.inputs, options.run.routing));
  }
  if (!gpu_state().obstacle.empty()) {
    throw InputError(fmt::format("bench needs the backend cuda: {}", gpu_state().obstacle));
  }
}

constexpr const char* kCommands = "run, verify, bench, info";

// What the parser could not place, in the order in which it was given.
std::string unexpected_text(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  const auto chosen = app.get_subcommands();
  if (chosen.empty() && !words.empty() && words[0][0] != '-') {
    return fmt::format("'{}' is not a command; allowed are {} (see moewave --help)", words[0], kCommands);
  }
  return fmt::format("'{}' was not expected; moewave {}--help lists what is allowed", fmt::join(words, " "),
                     chosen.empty() ? "" : chosen[0]->get_name() + " ");
}

}  // namespace

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kReference:
      return "reference";
    case Backend::kEmulator:
      return "emulator";
    case Backend::kCuda:
      return "cuda";
  }
  return "unknown";
}

std::optional<CommandLine> parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  CLI::App app("One Mixture-of-Experts layer, forward and backward, under expert parallelism.", "moewave");
  app.get_formatter()->label("SUBCOMMAND", "COMMAND");
  app.set_version_flag("--version", fmt::format("moewave {}", kVersion));
  const CLI::App* run = add_run_command(app, "run", "compute the layer and write the results", line.run);
  const CLI::App* verify =
      add_run_command(app, "verify", "run, then compare every result with the FP64 reference", line.run);
  const CLI::App* bench = add_bench_command(app, line.bench);
  CLI::App* info = app.add_subcommand("info", "print version, build, devices, backends and limits")->group("Commands");
  add_file(*info, "--json", "FILE|-", "the same, machine-readable; - is stdout", line.info_json, true);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    throw InputError(unexpected_text(app));
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
    throw InputError(fmt::format("one command is needed; allowed are {} (see moewave --help)", kCommands));
  }
  line.command = chosen[0] == run      ? Command::kRun
                 : chosen[0] == verify ? Command::kVerify
                 : chosen[0] == bench  ? Command::kBench
                                       : Command::kInfo;
  if (line.command == Command::kBench) check_bench(line.bench);
  if (line.command == Command::kRun || line.command == Command::kVerify) {
    resolve_backend(line.run);
    check_combinations(line.run);
  }
  return line;
}

}  // namespace moewave::cli
