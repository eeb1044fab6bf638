// libFuzzer's two entries for the file readers. The mutator knows the format: a change that keeps the header's length
// right gets further than any that does not.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "fuzz_safetensors.h"
#include "support/file_mutator.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace moewave::test {
namespace {

/// Cuts a file after its header; a random seed where there is none.
Parts cut(std::string_view bytes, Mutator& mutator, const std::vector<Parts>& seeds) {
  std::uint64_t length = 0;
  if (bytes.size() >= sizeof(length)) std::memcpy(&length, bytes.data(), sizeof(length));
  if (length == 0 || length > bytes.size() - sizeof(length)) return seeds[mutator.below(seeds.size())];
  return {std::string(bytes.substr(sizeof(length), length)), std::string(bytes.substr(sizeof(length) + length))};
}

std::string mutate(std::string_view bytes, unsigned seed) {
  static const std::vector<Parts> seeds = file_seeds();
  Mutator mutator(seed);
  if (mutator.below(16) == 0) {
    std::string index = bytes.starts_with("{\"") ? std::string(bytes) : kIndexSeed;
    mutator.mutate_json(index);
    return index;
  }
  return mutate_file(mutator, cut(bytes, mutator, seeds), seeds);
}

}  // namespace
}  // namespace moewave::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moewave::test::fuzz_one({reinterpret_cast<const char*>(data), size});
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string mutant = moewave::test::mutate({reinterpret_cast<const char*>(data), size}, seed);
  const std::size_t length = std::min(mutant.size(), max_size);
  std::memcpy(data, mutant.data(), length);
  return length;
}
