// The moewave program: parses the command line, runs a command, and turns every failure into one line and an exit code.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>

#include "commands.h"
#include "cuda_backend.h"
#include "io/text.h"
#include "moewave/error.h"
#include "options.h"

namespace moewave::cli {

void print_error(const std::string& message) { fmt::print(stderr, "moewave: {}\n", io::escape_controls(message)); }

namespace {

int run_program(int argc, char** argv) {
  prepare_cuda_environment();
  const std::optional<CommandLine> line = parse_command_line(argc, argv);
  if (!line) return kSuccess;
  if (line->command == Command::kInfo) return info_command(line->info_json);
  if (line->command == Command::kBench) return bench_command(line->bench);
  return run_command(line->run, line->command == Command::kVerify);
}

}  // namespace
}  // namespace moewave::cli

int main(int argc, char** argv) {
  namespace cli = moewave::cli;
  try {
    return cli::run_program(argc, argv);
  } catch (const moewave::InputError& error) {
    cli::print_error(error.what());
    return cli::kBadInput;
  } catch (const std::bad_alloc&) {
    cli::print_error("out of memory");
    return cli::kFailed;
  } catch (const std::exception& error) {
    cli::print_error(error.what());
    return cli::kFailed;
  }
}
