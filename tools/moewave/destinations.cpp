#include "destinations.h"

#include <fmt/format.h>

#include <filesystem>
#include <initializer_list>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "io/layer_files.h"
#include "moewave/error.h"

namespace moewave::cli {

namespace {

struct Destination {
  const char* option;
  std::string path;
};

// A file to read, where links and dots lead. What is not there is refused when it is read.
std::string place_of_input(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::canonical(path, ignored).string();
}

}  // namespace

void check_destinations(const RunOptions& options) {
  std::vector<std::pair<const char*, std::string>> taken;
  for (const auto& [option, path] :
       {Destination{"--weights", options.weights}, Destination{"--inputs", options.inputs}}) {
    if (!path.empty()) taken.emplace_back(option, place_of_input(path));
  }
  for (const auto& [option, path] :
       {Destination{"--output", options.output}, Destination{"--timeline", options.timeline},
        Destination{"--json", options.json_to_stdout() ? "" : options.json}}) {
    if (path.empty()) continue;
    const std::string place = io::check_writable(path);
    for (const auto& [other, other_place] : taken) {
      if (place != other_place) continue;
      throw InputError(fmt::format("{} {} is the file of {}; allowed is a file of its own", option, path, other));
    }
    taken.emplace_back(option, place);
  }
}

}  // namespace moewave::cli
