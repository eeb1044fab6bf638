#include "io/readable_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

constexpr std::size_t kMaxReadBytes = std::size_t{1} << 30;  // below what one read() can return

std::string reason(int error) { return std::generic_category().message(error); }

}  // namespace

ReadableFile::ReadableFile(const std::string& path) : path_(path) {
  if (path.empty()) throw InputError("the name of a file to read is empty");
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) throw InputError(fmt::format("{}: cannot be opened: {}", quote(path), reason(errno)));
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    const char* kind = S_ISDIR(status.st_mode) ? "a folder" : "not a regular file";
    throw InputError(fmt::format("{}: is {}; a file is needed", quote(path), kind));
  }
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

ReadableFile::~ReadableFile() { ::close(descriptor_); }

void ReadableFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ::ssize_t got =
        ::pread(descriptor_, out.data(), std::min(out.size(), kMaxReadBytes), static_cast<::off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw InputError(fmt::format("{}: cannot be read: {}", quote(path_), reason(errno)));
    if (got == 0) throw InputError(fmt::format("{}: ends at byte {}, more was expected", quote(path_), offset));
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace moewave::io
