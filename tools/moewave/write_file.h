// Where text results go.
#pragma once

#include <string>

namespace moewave::cli {

/// The file appears whole or not at all. Throws InputError when it cannot be written, Error when writing fails.
void write_text_file(const std::string& path, const std::string& text);

/// Writes to stdout and flushes. Throws Error when that fails, for instance because the disk behind it is full.
void write_stdout(const std::string& text);

}  // namespace moewave::cli
