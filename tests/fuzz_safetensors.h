// What the file fuzzers share: one input, taken as every kind of file that the program reads.
#pragma once

#include <string_view>

namespace moewave::test {

/// As what the bytes were accepted; all else was refused by an InputError of one line.
struct FuzzOutcome {
  bool safetensors = false;
  bool weights = false;
  bool inputs = false;
  bool index = false;
};

/// Throws std::logic_error when a promise is broken; any other exception is a broken promise too.
FuzzOutcome fuzz_one(std::string_view bytes);

}  // namespace moewave::test
