// Reading the safetensors format: 8 bytes of header length (little-endian), a JSON header, the tensors' bytes.
//
// Only the header is read on opening; a tensor is read when asked for, a part at a time, so a checkpoint larger than
// memory is fine. Everything throws InputError with one line that begins with the file's path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/readable_file.h"
#include "moewave/bf16.h"

namespace moewave::io {

/// Element types of the format. Those that no layer file may use are known so that they can be refused by name.
enum class DType {
  kF64,
  kF32,
  kF16,
  kBf16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
  kC64,
  kF8E4M3,
  kF8E5M2,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF8E8M0,
  kF6E2M3,
  kF6E3M2,
  kF4,
};
std::string_view dtype_name(DType dtype);  ///< as it stands in the file
std::uint64_t dtype_bits(DType dtype);     ///< of one element

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  std::uint64_t offset = 0;  ///< of its first byte in the file
  std::uint64_t bytes = 0;
};
using TensorMap = std::map<std::string, TensorInfo, std::less<>>;

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  ///< the format's own limit

/// Reads and checks a header. The tensors' bytes follow it at `data_begin`, `data_bytes` of them; tensors must lie in
/// there one after another without overlap, hole or rest, each as long as its dtype and shape say.
TensorMap parse_header(std::string_view header, std::uint64_t data_begin, std::uint64_t data_bytes,
                       const std::string& where);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const TensorMap& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  ///< null when absent

  /// `out` must have `elements` places. A dtype that is not named here is refused.
  void read(const TensorInfo& tensor, std::span<Bf16> out) const;   ///< F32 and F16 rounded to nearest even, BF16
  void read(const TensorInfo& tensor, std::span<float> out) const;  ///< F32
  void read(const TensorInfo& tensor, std::span<std::int64_t> out) const;  ///< I64, I32 widened

  /// Throws unless `tensor` has one of `allowed` dtypes.
  void require_dtype(const TensorInfo& tensor, std::initializer_list<DType> allowed) const;
  /// An InputError that names the file and `tensor`.
  [[noreturn]] void refuse(const TensorInfo& tensor, const std::string& why) const;

 private:
  ReadableFile file_;
  TensorMap tensors_;
};

/// Exact, subnormals, infinities and NaN included.
float f16_to_float(std::uint16_t bits);

}  // namespace moewave::io
