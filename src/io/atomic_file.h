// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace moewave::io {

/// Writes to a temporary beside `path`, which takes the place of `path` on commit(). Destroyed without commit(), it
/// leaves nothing behind and an older file at `path` as it was. A link at `path` is followed, also
/// to a file that does not exist yet.
class AtomicFile {
 public:
  /// Throws InputError when `path` cannot be written: folder missing, not a folder or not writable, or `path` is a
  /// folder, a device or a read-only file.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Where the bytes end up: absolute, without links and dots. Two spellings of one file have the same.
  const std::string& target() const { return target_; }

  /// Both throw Error when the disk is full or fails.
  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* step, int error) const;

  std::string target_;
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace moewave::io
