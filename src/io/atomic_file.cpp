#include "io/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLinks = 40;                                 // as many as Linux follows
constexpr std::size_t kMaxWriteBytes = std::size_t{1} << 30;  // below what one write() can take

std::string reason(int error) { return std::generic_category().message(error); }

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InputError(fmt::format("{}: cannot be written: {}", quote(path), why));
}

/// What the links at `path` lead to, which need not exist. (rename() would replace the link.)
fs::path follow_links(const std::string& path) {
  fs::path target(path);
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(target, error)); ++links) {
    if (links == kMaxLinks) refuse(path, fmt::format("it is a link that leads through more than {}", kMaxLinks));
    const fs::path next = fs::read_symlink(target, error);
    if (error) refuse(path, error.message());
    target = target.parent_path() / next;
  }
  return target;
}

/// Where the bytes end up: `path`, or what it links to, absolute and without links. Throws InputError unless that is
/// free or a writable regular file.
fs::path resolve_target(const std::string& path) {
  if (path.empty()) throw InputError("the name of a file to write is empty");
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::none) refuse(path, error.message());
  if (status.type() == fs::file_type::not_found) {
    const fs::path target = follow_links(path);
    if (!target.has_filename()) refuse(path, "it ends with '/', so it names a folder");
    const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
    if (!fs::is_directory(folder, error)) refuse(path, fmt::format("there is no folder {}", quote(folder.string())));
    const fs::path place = fs::canonical(folder, error);
    if (error) refuse(path, error.message());
    return place / target.filename();
  }
  if (status.type() == fs::file_type::directory) refuse(path, "it is a folder");
  if (status.type() != fs::file_type::regular) refuse(path, "it is not a regular file");
  if (::access(path.c_str(), W_OK) != 0) refuse(path, reason(errno));
  const fs::path target = fs::canonical(path, error);
  if (error) refuse(path, error.message());
  return target;
}

std::string temporary_name(const fs::path& target) {
  static std::atomic<unsigned> count{0};
  return (target.parent_path() / fmt::format(".moewave-{}-{}.tmp", ::getpid(), count.fetch_add(1))).string();
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) {
  const fs::path target = resolve_target(path);
  target_ = target.string();
  do {  // a name may be left from a killed process of the same number, perhaps on another machine
    temporary_ = temporary_name(target);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && (errno == EEXIST || errno == EINTR));
  if (descriptor_ < 0) refuse(path, reason(errno));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* step, int error) const {
  throw Error(fmt::format("{}: {} failed: {}", quote(target_), step, reason(error)));
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ::ssize_t put = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxWriteBytes));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("writing", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
}

void AtomicFile::commit() {
  // Before the rename, so that a crash cannot leave an empty file under the final name.
  if (::fsync(descriptor_) != 0) fail("writing", errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) fail("writing", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("renaming the finished file", errno);
  temporary_.clear();
}

}  // namespace moewave::io
