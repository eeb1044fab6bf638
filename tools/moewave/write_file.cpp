#include "write_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>

#include "io/atomic_file.h"
#include "moewave/error.h"

namespace moewave::cli {

void write_text_file(const std::string& path, const std::string& text) {
  io::AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

void write_stdout(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0)
    throw Error(fmt::format("cannot write to stdout: {}", std::strerror(errno)));
}

}  // namespace moewave::cli
