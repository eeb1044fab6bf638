#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

#include "build_info.h"
#include "commands.h"
#include "gpus.h"
#include "io/layer_files.h"
#include "moewave/config.h"
#include "moewave/version.h"
#include "text.h"
#include "write_file.h"

namespace moewave::cli {

namespace {

std::string build_text() {
  std::string text = fmt::format("{}, {}", kBuildType, kBuildCompiler);
  if (std::string_view(kBuildCommit) != "") text += fmt::format(", commit {}", kBuildCommit);
  if (std::string_view(kBuildSanitizer) != "none") text += fmt::format(", sanitizer {}", kBuildSanitizer);
  if (std::string_view(kBuildCuda) != "") text += fmt::format(", CUDA {}", kBuildCuda);
  return text;
}

std::string info_text() {
  std::string text = fmt::format("moewave {}\n", kVersion);
  text += fmt::format("  build     {}\n", build_text());
  const GpuState& state = gpu_state();
  text += "  backends  reference (FP64 on the CPU), emulator (ranks and SMs as threads)";
  text += state.obstacle.empty() ? ", cuda (forward)\n" : "\n";
  text += fmt::format("  default   {}\n", state.obstacle.empty() ? "cuda; emulator with --backward" : "emulator");
  if (!state.obstacle.empty()) text += fmt::format("  missing   cuda: {}\n", state.obstacle);
  text += fmt::format("  devices   CPU with {}\n", plural(std::thread::hardware_concurrency(), "thread"));
  for (const Gpu& gpu : state.gpus) {
    text +=
        fmt::format("            GPU {}: {}, compute capability {}, {}, {}{}\n", gpu.device, gpu.name, gpu.capability,
                    plural(gpu.sms, "SM"), human_bytes(gpu.memory_bytes), gpu.usable ? "" : ", not usable");
  }
  text += "  dtypes    bf16\n";
  text += fmt::format("  limits    hidden, intermediate, shared intermediate: multiples of {}\n", kDimensionMultiple);
  text += fmt::format("            experts 1 to {}, top-k 1 to min({}, experts), ranks 1 to {}\n", kMaxExperts,
                      kMaxTopk, kMaxRanks);
  return text;
}

std::string info_json() {
  nlohmann::ordered_json json = {{"format", "moewave-info"}, {"format_version", 1}, {"version", kVersion}};
  json["build"] = {{"type", kBuildType},
                   {"compiler", kBuildCompiler},
                   {"commit", kBuildCommit},
                   {"sanitizer", kBuildSanitizer},
                   {"cuda", kBuildCuda}};
  const GpuState& state = gpu_state();
  json["backends"] = {"reference", "emulator"};
  if (state.obstacle.empty()) json["backends"].push_back("cuda");
  json["default_backend"] = state.obstacle.empty() ? "cuda" : "emulator";
  json["cuda_obstacle"] = state.obstacle;
  json["devices"] = nlohmann::json::array();
  for (const Gpu& gpu : state.gpus) {
    json["devices"].push_back({{"device", gpu.device},
                               {"name", gpu.name},
                               {"capability", gpu.capability},
                               {"sms", gpu.sms},
                               {"memory_bytes", gpu.memory_bytes},
                               {"usable", gpu.usable}});
  }
  json["cpu_threads"] = std::thread::hardware_concurrency();
  json["dtypes"] = {"bf16"};
  json["limits"] = {
      {"dimension_multiple", kDimensionMultiple}, {"experts", kMaxExperts}, {"topk", kMaxTopk}, {"ranks", kMaxRanks}};
  return json.dump(2) + "\n";
}

}  // namespace

int info_command(const std::string& json_path) {
  if (json_path == "-") {
    write_stdout(info_json());
    return kSuccess;
  }
  if (!json_path.empty()) {
    io::check_writable(json_path);
    write_text_file(json_path, info_json());
  }
  write_stdout(info_text());
  return kSuccess;
}

}  // namespace moewave::cli
