// Good files of every kind, and seeded changes to them that get past a parser's first checks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "support/file_maker.h"

namespace moewave::test {

/// A file in its two parts, so that most mutants have a header length that is right and get past the first check.
struct Parts {
  std::string header;
  std::string data;
};

inline Parts parts_of(const FileMaker& maker, const TempFolder& folder) {
  const std::string bytes = read_bytes(maker.write(folder / "seed.safetensors"));
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  return {bytes.substr(sizeof(length), length), bytes.substr(sizeof(length) + length)};
}

inline FileMaker stacked_weights_seed() {
  FileMaker maker;
  maker.add_bf16("experts.gate_up_proj", {2, 4, 3}, 0).add_zeros("experts.down_proj", io::DType::kF32, {2, 3, 2});
  return maker;
}

inline FileMaker expert_weights_seed() {
  FileMaker maker;
  for (const std::string expert : {"mlp.experts.0.", "mlp.experts.1."}) {
    maker.add_bf16(expert + "gate_proj.weight", {2, 3}, 0).add_bf16(expert + "up_proj.weight", {2, 3}, 0);
    maker.add_zeros(expert + "down_proj.weight", io::DType::kF16, {3, 2});
  }
  maker.add_bf16("mlp.gate.weight", {2, 3}, 0);
  maker.add_bf16("mlp.shared_experts.gate_proj.weight", {1, 3}, 0);
  maker.add_bf16("mlp.shared_experts.up_proj.weight", {1, 3}, 0);
  maker.add_bf16("mlp.shared_experts.down_proj.weight", {3, 1}, 0);
  return maker;
}

inline FileMaker inputs_seed() {
  FileMaker maker;
  maker.add_bf16("hidden_states", {3, 2}, 0).add_zeros("topk_ids", io::DType::kI64, {3, 2});
  maker.add_zeros("topk_weights", io::DType::kF32, {3, 2}).add_zeros("grad_output", io::DType::kF16, {3, 2});
  maker.add("tokens_per_rank", io::DType::kI64, {2}, std::vector<std::int64_t>{1, 2});
  return maker;
}

inline std::vector<Parts> file_seeds() {
  const TempFolder folder;
  return {parts_of(stacked_weights_seed(), folder), parts_of(expert_weights_seed(), folder),
          parts_of(inputs_seed(), folder), parts_of(FileMaker(), folder)};
}

inline const std::string kIndexSeed =
    R"({"metadata":{"total_size":8},"weight_map":{"a.weight":"x-1.safetensors","b":"x-2"}})";

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  void mutate_bytes(std::string& text) {
    if (text.empty()) {
      text.push_back(any_byte());
      return;
    }
    const std::size_t at = below(text.size());
    const std::size_t length = std::min<std::size_t>(1 + below(16), text.size() - at);
    switch (below(7)) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text[at] = any_byte();
        break;
      case 2:
        text.insert(at, std::string(1 + below(8), any_byte()));
        break;
      case 3:
        text.erase(at, length);
        break;
      case 4:
        text.resize(at);
        break;
      case 5:
        text.insert(below(text.size()), text.substr(at, length));
        break;
      default:
        text.insert(at, any_of(kSpecialText));
    }
  }

  /// Another number where one stands, another dtype or name where one stands.
  void mutate_json(std::string& text) {
    const bool number = below(2) == 0;
    const std::string_view wanted = number ? "0123456789" : "\"";
    const std::size_t begin = text.find_first_of(wanted, below(text.size() + 1));
    if (begin == std::string::npos) return;
    if (number) {
      const std::size_t end = text.find_first_not_of(wanted, begin);
      text.replace(begin, end - begin, below(2) == 0 ? std::to_string(below(32)) : any_of(kSpecialNumbers));
    } else {
      const std::size_t end = text.find('"', begin + 1);
      if (end != std::string::npos) text.replace(begin + 1, end - begin - 1, any_of(kStrings));
    }
  }

  /// A length field that lies.
  std::string with_wrong_length(const Parts& parts) {
    std::string bytes = raw_file(parts.header, parts.data);
    const std::uint64_t length = below(2) == 0 ? parts.header.size() + below(16) - 8 : std::uint64_t{1} << below(64);
    std::memcpy(bytes.data(), &length, sizeof(length));
    return bytes;
  }

 private:
  char any_byte() { return static_cast<char>(below(256)); }

  template <std::size_t kCount>
  std::string any_of(const std::array<const char*, kCount>& choices) {
    return choices[below(kCount)];
  }

  static constexpr std::array kSpecialText = {"{",  "}",    "[",    "]",  ",",    ":",       "\"",      "\\",
                                              "\n", "null", "true", "{}", "[[[[", "\\u0000", "\\ud800", "\xc3\x28"};
  static constexpr std::array kSpecialNumbers = {"-1",
                                                 "1.0",
                                                 "1e3",
                                                 "NaN",
                                                 "4294967296",
                                                 "9223372036854775807",
                                                 "9223372036854775808",
                                                 "18446744073709551615",
                                                 "18446744073709551616",
                                                 "1e999"};
  static constexpr std::array kStrings = {"F32",
                                          "F16",
                                          "BF16",
                                          "F64",
                                          "I64",
                                          "I32",
                                          "U8",
                                          "BOOL",
                                          "F4",
                                          "F8_E4M3",
                                          "dtype",
                                          "shape",
                                          "data_offsets",
                                          "__metadata__",
                                          "weight_map",
                                          "../x",
                                          "/x",
                                          "hidden_states",
                                          "topk_ids",
                                          "experts.gate_up_proj",
                                          "experts.0.w1.weight",
                                          "mlp.shared_expert.up_proj.weight",
                                          "mlp.experts.7.up_proj.weight",
                                          ""};

  std::mt19937_64 random_;
};

/// Another file made of `parts`; its data may come from one of `seeds`.
inline std::string mutate_file(Mutator& mutator, Parts parts, const std::vector<Parts>& seeds) {
  for (std::uint64_t count = 1 + mutator.below(3); count > 0; --count) {
    switch (mutator.below(5)) {
      case 0:
        mutator.mutate_bytes(parts.header);
        break;
      case 1:
        mutator.mutate_bytes(parts.data);
        break;
      case 2:
        parts.data = seeds[mutator.below(seeds.size())].data;
        break;
      default:
        mutator.mutate_json(parts.header);
    }
  }
  if (mutator.below(16) == 0) return mutator.with_wrong_length(parts);
  std::string bytes = raw_file(parts.header, parts.data);
  if (mutator.below(8) == 0) mutator.mutate_bytes(bytes);
  return bytes;
}

}  // namespace moewave::test
