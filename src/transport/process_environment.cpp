// What launchers tell a process about its place in the job.
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "moewave/error.h"
#include "moewave/process_group.h"

namespace moewave {
namespace {

constexpr int kMostProcesses = 1024;
constexpr int kMostPort = 65535;

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody sets it meanwhile
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

int number(const char* name, const std::string& text, int min, int max) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || value < min || value > max) {
    throw InputError("environment variable " + std::string(name) + " is '" + text + "'; it must be a number from " +
                     std::to_string(min) + " to " + std::to_string(max));
  }
  return value;
}

struct Launcher {
  const char* rank;
  const char* size;
};
constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMI_RANK", "PMI_SIZE"}};
constexpr const char* kLocalRanks[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"};

}  // namespace

ProcessGroupOptions process_group_from_environment() {
  ProcessGroupOptions options;
  for (const Launcher& launcher : kLaunchers) {
    const auto rank = variable(launcher.rank);
    const auto size = variable(launcher.size);
    if (!rank && !size) continue;
    if (!rank || !size) {
      throw InputError("environment variable " + std::string(rank ? launcher.rank : launcher.size) + " is set, but " +
                       (rank ? launcher.size : launcher.rank) + " is not; both or neither must be");
    }
    options.processes = number(launcher.size, *size, 1, kMostProcesses);
    options.process = number(launcher.rank, *rank, 0, options.processes - 1);
    break;
  }
  if (const auto address = variable("MASTER_ADDR")) options.address = *address;
  if (const auto port = variable("MASTER_PORT")) options.port = number("MASTER_PORT", *port, 1, kMostPort - 1);
  if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True") ++options.port;
  return options;
}

int local_process_from_environment() {
  for (const char* name : kLocalRanks) {
    if (const auto value = variable(name)) return number(name, *value, 0, kMostProcesses - 1);
  }
  return 0;
}

}  // namespace moewave
