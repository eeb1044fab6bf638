// Files for tests: a folder of their own, tensors with made-up values, bytes as they are wanted.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors_writer.h"
#include "moewave/bf16.h"
#include "moewave/error.h"

namespace moewave::test {

/// An empty folder, removed with all that is in it.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "moewave-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw Error("no folder for temporary files: " + name);
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string operator/(std::string_view name) const { return (path_ / name).string(); }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) result.push_back(entry.path().filename());
    return result;
  }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A safetensors file with this header and data, whatever they say.
inline std::string raw_file(std::string_view header, std::string_view data) {
  const std::uint64_t length = header.size();
  std::string result(sizeof(length), '\0');
  std::memcpy(result.data(), &length, sizeof(length));
  return result.append(header).append(data);
}

/// Collects tensors and owns their values.
class FileMaker {
 public:
  template <typename T>
  FileMaker& add(const std::string& name, io::DType dtype, std::vector<std::int64_t> shape,
                 const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    values_.emplace_back(bytes.begin(), bytes.end());
    tensors_.push_back({name, dtype, std::move(shape), values_.back()});
    return *this;
  }

  /// Zeros of any dtype.
  FileMaker& add_zeros(const std::string& name, io::DType dtype, std::vector<std::int64_t> shape) {
    const auto bits = static_cast<std::size_t>(elements(shape)) * io::dtype_bits(dtype);
    return add(name, dtype, std::move(shape), std::vector<std::byte>(bits / 8));
  }

  /// BF16 whole numbers that tell tensors and places apart: first, first + 1, ...
  FileMaker& add_bf16(const std::string& name, std::vector<std::int64_t> shape, float first) {
    auto values = counting(elements(shape), first);
    return add(name, io::DType::kBf16, std::move(shape), values);
  }

  static std::vector<Bf16> counting(std::int64_t count, float first) {
    std::vector<Bf16> values;
    for (std::int64_t i = 0; i < count; ++i) values.push_back(to_bf16(first + static_cast<float>(i)));
    return values;
  }

  const std::string& write(const std::string& path) const {
    io::write_safetensors(path, tensors_);
    return path;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const io::TensorData& tensor : tensors_) result.push_back(tensor.name);
    return result;
  }

 private:
  static std::int64_t elements(const std::vector<std::int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }

  std::deque<std::vector<std::byte>> values_;
  std::vector<io::TensorData> tensors_;
};

}  // namespace moewave::test
