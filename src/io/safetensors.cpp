#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "io/strict_json.h"
#include "io/text.h"
#include "layer/plural.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and read without swapping");

using Json = nlohmann::json;

struct DTypeRow {
  DType dtype;
  std::string_view name;
  std::uint64_t bits;
};
constexpr std::array kDTypes = {
    DTypeRow{DType::kF64, "F64", 64},
    DTypeRow{DType::kF32, "F32", 32},
    DTypeRow{DType::kF16, "F16", 16},
    DTypeRow{DType::kBf16, "BF16", 16},
    DTypeRow{DType::kI64, "I64", 64},
    DTypeRow{DType::kI32, "I32", 32},
    DTypeRow{DType::kI16, "I16", 16},
    DTypeRow{DType::kI8, "I8", 8},
    DTypeRow{DType::kU64, "U64", 64},
    DTypeRow{DType::kU32, "U32", 32},
    DTypeRow{DType::kU16, "U16", 16},
    DTypeRow{DType::kU8, "U8", 8},
    DTypeRow{DType::kBool, "BOOL", 8},
    DTypeRow{DType::kC64, "C64", 64},
    DTypeRow{DType::kF8E4M3, "F8_E4M3", 8},
    DTypeRow{DType::kF8E5M2, "F8_E5M2", 8},
    DTypeRow{DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8},
    DTypeRow{DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8},
    DTypeRow{DType::kF8E8M0, "F8_E8M0", 8},
    DTypeRow{DType::kF6E2M3, "F6_E2M3", 6},
    DTypeRow{DType::kF6E3M2, "F6_E3M2", 6},
    DTypeRow{DType::kF4, "F4", 4},
};

constexpr bool rows_follow_the_enum() {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (static_cast<std::size_t>(kDTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_follow_the_enum());

const DTypeRow& row(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }

/// One tensor's entry in the header, checked on its own.
class EntryReader {
 public:
  EntryReader(const std::string& where, const std::string& name) : where_(where), name_(name) {}

  TensorInfo read(const Json& entry, std::uint64_t data_begin, std::uint64_t data_bytes) const {
    if (!entry.is_object()) fail("is not an object with dtype, shape and data_offsets");
    for (const auto& item : entry.items()) {
      if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets") {
        fail(fmt::format("has the key {}; allowed: dtype, shape, data_offsets", quote(item.key())));
      }
    }
    TensorInfo tensor;
    tensor.name = name_;
    tensor.dtype = dtype(entry);
    std::uint64_t elements = 0;
    const std::uint64_t bytes = size(entry, tensor, elements);
    const auto [begin, end] = offsets(entry, data_bytes);
    if (end - begin != bytes) {
      fail(fmt::format("takes {} in the file, but {} {} needs {}", plural(end - begin, "byte"),
                       dtype_name(tensor.dtype), shape_text(tensor.shape), bytes));
    }
    tensor.elements = static_cast<std::int64_t>(elements);
    tensor.offset = data_begin + begin;
    tensor.bytes = bytes;
    return tensor;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: tensor {} {}", where_, quote(name_), what));
  }

  const Json& field(const Json& entry, const char* key) const {
    const auto found = entry.find(key);
    if (found == entry.end()) fail(fmt::format("has no {}", key));
    return *found;
  }

  DType dtype(const Json& entry) const {
    const Json& value = field(entry, "dtype");
    if (!value.is_string()) fail("has a dtype that is not a string");
    const auto& text = value.get_ref<const std::string&>();
    for (const DTypeRow& known : kDTypes) {
      if (known.name == text) return known.dtype;
    }
    fail(fmt::format("has the unknown dtype {}", quote(text, 40)));
  }

  /// Reads the shape; gives the bytes it needs, and the elements.
  std::uint64_t size(const Json& entry, TensorInfo& tensor, std::uint64_t& elements) const {
    const Json& value = field(entry, "shape");
    if (!value.is_array()) fail("has a shape that is not an array");
    elements = 1;
    for (const Json& dimension : value) {
      constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (!dimension.is_number_unsigned() || dimension.get<std::uint64_t>() > kMax) {
        fail("has a dimension that is not an integer from 0 to 2^63 - 1");
      }
      const auto extent = dimension.get<std::uint64_t>();
      if (__builtin_mul_overflow(elements, extent, &elements)) fail("has a shape with more than 2^64 elements");
      tensor.shape.push_back(static_cast<std::int64_t>(extent));
    }
    std::uint64_t bits = 0;
    if (__builtin_mul_overflow(elements, dtype_bits(tensor.dtype), &bits)) fail("has a shape with more than 2^64 bits");
    if (bits % 8 != 0) fail("does not end at a whole byte");
    return bits / 8;
  }

  std::pair<std::uint64_t, std::uint64_t> offsets(const Json& entry, std::uint64_t data_bytes) const {
    const Json& value = field(entry, "data_offsets");
    if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() || !value[1].is_number_unsigned()) {
      fail("has data_offsets that are not two integers >= 0");
    }
    const auto begin = value[0].get<std::uint64_t>();
    const auto end = value[1].get<std::uint64_t>();
    if (begin > end || end > data_bytes) {
      fail(fmt::format("has data_offsets [{}, {}]; allowed: begin <= end <= {}, where the file ends", begin, end,
                       data_bytes));
    }
    return {begin, end};
  }

  const std::string& where_;
  const std::string& name_;
};

void check_metadata(const Json& metadata, const std::string& where) {
  if (!metadata.is_object()) throw InputError(fmt::format("{}: __metadata__ is not an object of strings", where));
  for (const auto& item : metadata.items()) {
    if (!item.value().is_string()) {
      throw InputError(fmt::format("{}: __metadata__ {} is not a string", where, quote(item.key())));
    }
  }
}

/// Every byte of the data belongs to exactly one tensor.
void check_packed(const TensorMap& tensors, std::uint64_t data_begin, std::uint64_t data_bytes,
                  const std::string& where) {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, tensor] : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->offset, a->bytes) < std::pair(b->offset, b->bytes);
  });
  std::uint64_t end = data_begin;
  for (const TensorInfo* tensor : order) {
    if (tensor->offset != end) {
      const char* what = tensor->offset < end ? "overlaps the tensor before it" : "leaves a hole before it";
      throw InputError(fmt::format("{}: tensor {} begins at data byte {}, {}, which ends at {}", where,
                                   quote(tensor->name), tensor->offset - data_begin, what, end - data_begin));
    }
    end += tensor->bytes;
  }
  if (end != data_begin + data_bytes) {
    throw InputError(fmt::format("{}: {} after the last tensor; none are allowed", where,
                                 plural(data_begin + data_bytes - end, "byte")));
  }
}

TensorMap read_header(const ReadableFile& file) {
  const std::string where = quote(file.path());
  std::uint64_t length = 0;
  if (file.bytes() < sizeof(length)) {
    throw InputError(fmt::format("{}: has {}; a safetensors file has at least 8", where, plural(file.bytes(), "byte")));
  }
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const std::uint64_t rest = file.bytes() - sizeof(length);
  if (length > std::min(kMaxHeaderBytes, rest)) {
    throw InputError(
        fmt::format("{}: names a header of {}; allowed: at most {} and the {} that follow; truncated "
                    "or not a safetensors file",
                    where, plural(length, "byte"), kMaxHeaderBytes, rest));
  }
  std::string header(length, '\0');
  file.read(sizeof(length), std::as_writable_bytes(std::span(header)));
  return parse_header(header, sizeof(length) + length, rest - length, where);
}

/// Reads a tensor a part at a time and converts each element.
template <typename Source, typename Target, typename Convert>
void read_converted(const ReadableFile& file, const TensorInfo& tensor, std::span<Target> out, Convert convert) {
  constexpr std::size_t kPart = std::size_t{1} << 18;
  std::vector<Source> part(std::min(out.size(), kPart));
  for (std::size_t begin = 0; begin < out.size(); begin += part.size()) {
    const std::span<Source> source = std::span(part).first(std::min(part.size(), out.size() - begin));
    file.read(tensor.offset + begin * sizeof(Source), std::as_writable_bytes(source));
    std::transform(source.begin(), source.end(), out.begin() + static_cast<std::ptrdiff_t>(begin), convert);
  }
}

template <typename T>
void check_places(const TensorInfo& tensor, std::span<T> out) {
  if (out.size() != static_cast<std::size_t>(tensor.elements)) {
    throw Error(fmt::format("tensor {} has {}, the buffer for it {}", quote(tensor.name),
                            plural(tensor.elements, "element"), out.size()));
  }
}

}  // namespace

std::string_view dtype_name(DType dtype) { return row(dtype).name; }
std::uint64_t dtype_bits(DType dtype) { return row(dtype).bits; }

TensorMap parse_header(std::string_view header, std::uint64_t data_begin, std::uint64_t data_bytes,
                       const std::string& where) {
  if (header.empty() || header.front() != '{') {
    throw InputError(fmt::format("{}: the header does not begin with '{{'; not a safetensors file", where));
  }
  const Json json = parse_json_object(header, where);
  TensorMap tensors;
  for (const auto& item : json.items()) {
    if (item.key() == "__metadata__") {
      check_metadata(item.value(), where);
    } else {
      tensors.emplace(item.key(), EntryReader(where, item.key()).read(item.value(), data_begin, data_bytes));
    }
  }
  check_packed(tensors, data_begin, data_bytes, where);
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path), tensors_(read_header(file_)) {}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void SafetensorsFile::refuse(const TensorInfo& tensor, const std::string& why) const {
  throw InputError(fmt::format("{}: tensor {} {}", quote(path()), quote(tensor.name), why));
}

void SafetensorsFile::require_dtype(const TensorInfo& tensor, std::initializer_list<DType> allowed) const {
  if (std::find(allowed.begin(), allowed.end(), tensor.dtype) != allowed.end()) return;
  std::string names;
  for (const DType dtype : allowed) names += fmt::format("{}{}", names.empty() ? "" : ", ", dtype_name(dtype));
  refuse(tensor, fmt::format("is {}; allowed: {}", dtype_name(tensor.dtype), names));
}

void SafetensorsFile::read(const TensorInfo& tensor, std::span<Bf16> out) const {
  check_places(tensor, out);
  require_dtype(tensor, {DType::kBf16, DType::kF32, DType::kF16});
  switch (tensor.dtype) {
    case DType::kF32:
      return read_converted<float>(file_, tensor, out, [](float value) { return to_bf16(value); });
    case DType::kF16:
      return read_converted<std::uint16_t>(file_, tensor, out,
                                           [](std::uint16_t bits) { return to_bf16(f16_to_float(bits)); });
    default:
      return file_.read(tensor.offset, std::as_writable_bytes(out));
  }
}

void SafetensorsFile::read(const TensorInfo& tensor, std::span<float> out) const {
  check_places(tensor, out);
  require_dtype(tensor, {DType::kF32});
  file_.read(tensor.offset, std::as_writable_bytes(out));
}

void SafetensorsFile::read(const TensorInfo& tensor, std::span<std::int64_t> out) const {
  check_places(tensor, out);
  require_dtype(tensor, {DType::kI32, DType::kI64});
  if (tensor.dtype == DType::kI32) {
    read_converted<std::int32_t>(file_, tensor, out, [](std::int32_t value) { return std::int64_t{value}; });
  } else {
    file_.read(tensor.offset, std::as_writable_bytes(out));
  }
}

float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: a multiple of 2^-24, exact in FP32
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t wide_exponent = exponent == 0x1fu ? 0xffu : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

}  // namespace moewave::io
