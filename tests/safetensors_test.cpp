// The format itself: what is written is read back, what is malformed is refused.
#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <csignal>
#include <limits>

#include "files_support.h"
#include "io/atomic_file.h"
#include "io/safetensors_writer.h"

namespace moewave::test {
namespace {

using io::DType;
using io::SafetensorsFile;
using Strings = std::initializer_list<std::string_view>;

std::vector<Bf16> read_bf16(const SafetensorsFile& file, std::string_view name) {
  const io::TensorInfo* tensor = file.find(name);
  std::vector<Bf16> result(static_cast<std::size_t>(tensor->elements));
  file.read(*tensor, std::span(result));
  return result;
}

class SafetensorsRoundTrip : public testing::Test {
 protected:
  TempFolder folder_;
};

TEST_F(SafetensorsRoundTrip, EveryDtypeAndShapeComesBack) {
  FileMaker maker;
  const std::vector<std::vector<std::int64_t>> shapes = {{}, {0}, {3, 0, 5}, {8}, {2, 4}, {1, 2, 2, 2}};
  for (int dtype = 0; dtype <= static_cast<int>(DType::kF4); ++dtype) {
    for (std::size_t shape = 0; shape < shapes.size(); ++shape) {
      if (shapes[shape].empty() && io::dtype_bits(DType{dtype}) < 8) continue;  // half a byte
      maker.add_zeros(std::to_string(dtype) + "." + std::to_string(shape), DType{dtype}, shapes[shape]);
    }
  }
  const SafetensorsFile file(maker.write(folder_ / "all.safetensors"));
  EXPECT_EQ(file.tensors().size(), maker.names().size());
  for (const auto& [name, tensor] : file.tensors()) {
    const std::size_t dot = name.find('.');
    EXPECT_EQ(static_cast<int>(tensor.dtype), std::stoi(name.substr(0, dot)));
    EXPECT_EQ(tensor.shape, shapes[std::stoul(name.substr(dot + 1))]);
    EXPECT_EQ(tensor.offset * 8 % std::max<std::uint64_t>(io::dtype_bits(tensor.dtype), 8), 0u) << name;
  }
}

TEST_F(SafetensorsRoundTrip, ValuesComeBackBitForBit) {
  const std::vector<Bf16> bf16 = {{0x0000}, {0x8000}, {0x3f80}, {0x7f80}, {0x7fc1}, {0x0001}};
  const std::vector<float> f32 = {0.0f, -1.5f, 1e-40f, std::numeric_limits<float>::infinity()};
  const std::vector<std::int64_t> i64 = {std::numeric_limits<std::int64_t>::min(), -1, 1};
  const std::vector<std::int32_t> i32 = {std::numeric_limits<std::int32_t>::min(), -1, 7};
  FileMaker maker;
  maker.add("b", DType::kBf16, {6}, bf16).add("f", DType::kF32, {2, 2}, f32);
  maker.add("long", DType::kI64, {3}, i64).add("int", DType::kI32, {3}, i32);
  const SafetensorsFile file(maker.write(folder_ / "values.safetensors"));

  EXPECT_EQ(read_bf16(file, "b"), bf16);
  std::vector<float> floats(4);
  file.read(*file.find("f"), std::span(floats));
  EXPECT_EQ(floats, f32);
  std::vector<std::int64_t> longs(3);
  file.read(*file.find("long"), std::span(longs));
  EXPECT_EQ(longs, i64);
  file.read(*file.find("int"), std::span(longs));
  EXPECT_EQ(longs, std::vector<std::int64_t>(i32.begin(), i32.end()));
}

TEST_F(SafetensorsRoundTrip, TensorsLongerThanOnePartAreConvertedWhole) {
  constexpr std::int64_t kCount = 600'001;
  std::vector<float> values;
  for (std::int64_t i = 0; i < kCount; ++i) values.push_back(static_cast<float>(i % 251));
  FileMaker maker;
  maker.add_bf16("before", {3}, 1).add("long", DType::kF32, {kCount}, values);
  const SafetensorsFile file(maker.write(folder_ / "long.safetensors"));
  const std::vector<Bf16> read = read_bf16(file, "long");
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(to_float(read[i]), values[i]) << i;
}

TEST_F(SafetensorsRoundTrip, Float32IsRoundedToNearestEven) {
  const std::vector<float> values = {
      1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 1.0f + 0x1p-8f + 0x1p-20f, -(1.0f + 0x1p-8f), 0x1.fffffep127f, 1e-45f, -0.0f};
  const std::vector<float> wanted = {1.0f, 1.0f + 0x1p-6f, 1.0f + 0x1p-7f, -1.0f, INFINITY, 0.0f, -0.0f};
  FileMaker maker;
  maker.add("t", DType::kF32, {7}, values);
  const SafetensorsFile file(maker.write(folder_ / "f32.safetensors"));
  const std::vector<Bf16> read = read_bf16(file, "t");
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(read[i], to_bf16(wanted[i])) << i;
  EXPECT_TRUE(std::isnan(to_float(to_bf16(NAN))));
}

TEST_F(SafetensorsRoundTrip, EveryFloat16ValueIsConvertedAsItsExactValue) {
  std::vector<std::uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), std::uint16_t{0});
  FileMaker maker;
  maker.add("t", DType::kF16, {65536}, halves);
  const SafetensorsFile file(maker.write(folder_ / "f16.safetensors"));
  const std::vector<Bf16> read = read_bf16(file, "t");
  for (const std::uint32_t bits : halves) {
    const int exponent = static_cast<int>((bits >> 10) & 31);
    const auto mantissa = static_cast<double>(bits & 1023);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    const float value = to_float(read[bits]);
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    const double exact = exponent == 31  ? INFINITY
                         : exponent == 0 ? std::ldexp(mantissa, -24)
                                         : std::ldexp(1 + mantissa / 1024, exponent - 15);
    ASSERT_EQ(read[bits], to_bf16(static_cast<float>(sign * exact))) << bits;
    ASSERT_EQ(std::signbit(value), sign < 0) << bits;
  }
}

TEST_F(SafetensorsRoundTrip, AFileWithoutTensorsIsLegal) {
  write_bytes(folder_ / "empty.safetensors", raw_file("{}", ""));
  EXPECT_TRUE(SafetensorsFile(folder_ / "empty.safetensors").tensors().empty());
  FileMaker().write(folder_ / "written.safetensors");
  EXPECT_TRUE(SafetensorsFile(folder_ / "written.safetensors").tensors().empty());
}

TEST_F(SafetensorsRoundTrip, MetadataOfStringsIsAccepted) {
  const std::string header =
      R"({"__metadata__":{"format":"pt","a\n":"é"},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  write_bytes(folder_ / "m.safetensors", raw_file(header + "   ", "x"));
  EXPECT_EQ(SafetensorsFile(folder_ / "m.safetensors").tensors().size(), 1u);
}

// ---- Malformed files
// --------------------------------------------------------------------------------------------------

class MalformedSafetensors : public testing::Test {
 protected:
  void refused(std::string_view bytes, Strings parts) {
    const std::string path = folder_ / "bad.safetensors";
    write_bytes(path, bytes);
    expect_input_error([&] { SafetensorsFile{path}; }, parts);
  }
  void header_refused(std::string_view header, std::string_view data, Strings parts) {
    SCOPED_TRACE(header.substr(0, 200));
    refused(raw_file(header, data), parts);
  }
  /// The entry of one tensor 't' with 4 bytes of data.
  void entry_refused(const std::string& entry, Strings parts) {
    header_refused("{\"t\":" + entry + "}", "1234", parts);
  }

  TempFolder folder_;
};

TEST_F(MalformedSafetensors, TruncatedAtAnyByteIsRefused) {
  FileMaker maker;
  maker.add_bf16("one", {2, 3}, 1).add_zeros("two", DType::kI64, {2});
  const std::string whole = read_bytes(maker.write(folder_ / "whole.safetensors"));
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    refused(std::string_view(whole).substr(0, length), {"bad.safetensors"});
  }
  refused(whole + "x", {": 1 byte after the last tensor"});
}

TEST_F(MalformedSafetensors, HeaderLengthBeyondFileOrLimitIsRefused) {
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{100'000'001}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    refused(bytes + "{}", {std::string("header of ") + std::to_string(length) + " bytes"});
  }
  refused(std::string(8, '\0'), {"does not begin with '{'"});
}

TEST_F(MalformedSafetensors, HeaderThatIsNotOneJsonObjectIsRefused) {
  header_refused("[]", "", {"does not begin with '{'"});
  header_refused(" {}", "", {"does not begin with '{'"});
  header_refused("{", "", {"not valid JSON near byte"});
  header_refused("{}}", "", {"not valid JSON"});
  header_refused("{\"a\":1,}", "", {"not valid JSON"});
  header_refused("{\"a\":nan}", "", {"not valid JSON"});
  header_refused("{\"a\n\":1}", "", {"not valid JSON"});
  header_refused("{\"\xff\":1}", "", {"not valid JSON"});
  header_refused("{\"\xc0\x80\":1}", "", {"not valid JSON"});
  header_refused("{\"a\":1e999}", "", {"out of range"});
  header_refused("\xef\xbb\xbf{}", "", {"does not begin with '{'"});
}

TEST_F(MalformedSafetensors, DeepNestingIsRefused) {
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += "{\"a\":";
  header_refused(objects, "", {"nested deeper than 16"});
  header_refused("{\"a\":" + std::string(2'000'000, '['), "", {"nested deeper than 16"});
}

TEST_F(MalformedSafetensors, AKeyThatIsThereTwiceIsRefused) {
  const std::string entry = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  header_refused("{\"a\":" + entry + ",\"a\":" + entry + "}", "x", {"key 'a' is there twice"});
  header_refused("{\"a\":" + entry + ",\"\\u0061\":" + entry + "}", "x", {"key 'a' is there twice"});
  entry_refused(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})", {"key 'dtype' is there twice"});
}

TEST_F(MalformedSafetensors, EntryThatIsNotATensorIsRefusedByName) {
  entry_refused("1", {"tensor 't' is not an object"});
  entry_refused("null", {"tensor 't' is not an object"});
  entry_refused("[]", {"tensor 't' is not an object"});
  entry_refused(R"({"shape":[1],"data_offsets":[0,4]})", {"tensor 't' has no dtype"});
  entry_refused(R"({"dtype":"F32","data_offsets":[0,4]})", {"tensor 't' has no shape"});
  entry_refused(R"({"dtype":"F32","shape":[1]})", {"tensor 't' has no data_offsets"});
  entry_refused(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})", {"tensor 't' has the key 'x'"});
}

TEST_F(MalformedSafetensors, UnknownDtypeIsRefusedByName) {
  entry_refused(R"({"dtype":"F128","shape":[1],"data_offsets":[0,4]})", {"tensor 't'", "unknown dtype 'F128'"});
  entry_refused(R"({"dtype":"f32","shape":[1],"data_offsets":[0,4]})", {"unknown dtype 'f32'"});
  entry_refused(R"({"dtype":32,"shape":[1],"data_offsets":[0,4]})", {"dtype that is not a string"});
}

TEST_F(MalformedSafetensors, ShapeThatIsNoShapeIsRefused) {
  const auto shape_refused = [this](const std::string& shape, std::string_view part) {
    entry_refused(R"({"dtype":"F32","data_offsets":[0,4],"shape":)" + shape + "}", {"tensor 't'", part});
  };
  for (const char* shape : {"1", "null", "{}", "\"1\""}) shape_refused(shape, "not an array");
  for (const char* shape : {"[-1]", "[1.0]", "[1e0]", "[null]", "[\"1\"]", "[[1]]", "[true]", "[9223372036854775808]",
                            "[18446744073709551616]"}) {
    shape_refused(shape, "not an integer from 0");
  }
  shape_refused("[4294967296,4294967296]", "more than 2^64 elements");
  shape_refused("[2305843009213693952]", "more than 2^64 bits");
  shape_refused("[2]", "takes 4 bytes in the file, but F32 [2] needs 8");
  shape_refused("[0]", "takes 4 bytes in the file, but F32 [0] needs 0");
}

TEST_F(MalformedSafetensors, OffsetsOutsideTheFileAreRefused) {
  const auto offsets_refused = [this](const std::string& offsets, std::string_view part) {
    entry_refused(R"({"dtype":"F32","shape":[1],"data_offsets":)" + offsets + "}", {"tensor 't'", part});
  };
  for (const char* offsets : {"4", "[]", "[0]", "[0,4,4]", "[-4,0]", "[0.0,4]", "[0,4.0]", "[0,\"4\"]", "[null,4]",
                              "[0,36893488147419103232]", "{}"}) {
    offsets_refused(offsets, "not two integers");
  }
  offsets_refused("[4,0]", "[4, 0]; allowed: begin <= end <= 4");
  offsets_refused("[0,5]", "[0, 5]; allowed: begin <= end <= 4");
  offsets_refused("[18446744073709551612,18446744073709551615]", "allowed: begin <= end <= 4");
  offsets_refused("[0,3]", "takes 3 bytes");
}

TEST_F(MalformedSafetensors, OverlapHoleAndRestAreRefused) {
  const auto two_bytes_at = [](int begin) {
    std::string entry = R"({"dtype":"U8","shape":[2],"data_offsets":[)";
    return entry.append(std::to_string(begin)).append(",").append(std::to_string(begin + 2)).append("]}");
  };
  const auto two = [two_bytes_at](int a, int b) {
    return std::string("{\"a\":").append(two_bytes_at(a)).append(",\"b\":").append(two_bytes_at(b)).append("}");
  };
  header_refused(two(0, 1), "1234", {"tensor 'b'", "overlaps the tensor before it"});
  header_refused(two(0, 0), "1234", {"tensor 'b'", "overlaps"});
  header_refused(two(0, 3), "12345", {"tensor 'b'", "leaves a hole before it"});
  header_refused(two(1, 3), "12345", {"tensor 'a'", "leaves a hole before it"});
  header_refused(two(2, 0), "12345", {": 1 byte after the last tensor"});
  header_refused("{}", "12345", {"5 bytes after the last tensor"});
}

TEST_F(MalformedSafetensors, MetadataOtherThanStringsIsRefused) {
  header_refused(R"({"__metadata__":{"a":1}})", "", {"__metadata__ 'a' is not a string"});
  header_refused(R"({"__metadata__":[]})", "", {"__metadata__ is not an object"});
  header_refused(R"({"__metadata__":null})", "", {"__metadata__ is not an object"});
}

TEST_F(MalformedSafetensors, HalfABytePerTensorIsRefused) {
  header_refused(R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "12",
                 {"'t' does not end at a whole byte"});
}

TEST_F(MalformedSafetensors, NamesWithControlCharactersGiveOneLine) {
  header_refused(R"({"a\nb\u0000\u007f":1})", "", {R"(tensor 'a\x0ab\x00\x7f' is not an object)"});
  header_refused("{\"" + std::string(100'000, 'n') + "\":1}", "", {"nnn...' is not an object"});
}

TEST_F(MalformedSafetensors, PathsThatAreNoFilesAreRefused) {
  expect_input_error([&] { SafetensorsFile{folder_ / "absent"}; }, {"absent", "No such file"});
  expect_input_error([&] { SafetensorsFile{folder_ / "."}; }, {"is a folder"});
  expect_input_error([&] { SafetensorsFile{""}; }, {"empty"});
  expect_input_error([&] { SafetensorsFile{"/dev/zero"}; }, {"not a regular file"});
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  expect_input_error([&] { SafetensorsFile{folder_ / "pipe"}; }, {"not a regular file"});
}

TEST_F(MalformedSafetensors, AFileThatShrinksWhileOpenIsAnError) {
  FileMaker maker;
  maker.add_bf16("t", {1000}, 0);
  const std::string path = maker.write(folder_ / "shrinks.safetensors");
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 500);
  expect_input_error([&] { read_bf16(file, "t"); }, {"shrinks.safetensors", "ends at byte"});
}

// ---- Writing
// ----------------------------------------------------------------------------------------------------------

class SafetensorsWriting : public testing::Test {
 protected:
  TempFolder folder_;
  const std::vector<float> values_ = std::vector<float>(100'000, 1.0f);
  const io::TensorData tensor_{"t", DType::kF32, {100'000}, std::as_bytes(std::span(values_))};
  void write(const std::string& path) { io::write_safetensors(path, std::span(&tensor_, 1)); }
};

/// Files of this process end at `bytes`, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(::rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const ::rlimit limit{bytes, before_.rlim_max};
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  ::rlimit before_{};
  void (*handler_)(int) = SIG_DFL;
};

TEST_F(SafetensorsWriting, AFailedWriteLeavesNoFile) {
  const std::string path = folder_ / "out.safetensors";
  {
    const FullDisk full(1000);
    EXPECT_THROW(write(path), Error);
  }
  EXPECT_TRUE(folder_.names().empty());
}

TEST_F(SafetensorsWriting, AFailedWriteKeepsTheOlderFile) {
  const std::string path = folder_ / "out.safetensors";
  write_bytes(path, "older");
  {
    const FullDisk full(1000);
    EXPECT_THROW(write(path), Error);
  }
  EXPECT_EQ(read_bytes(path), "older");
  EXPECT_EQ(folder_.names().size(), 1u);
}

TEST_F(SafetensorsWriting, AFinishedWriteReplacesTheOlderFileAndLeavesNoOther) {
  const std::string path = folder_ / "out.safetensors";
  write_bytes(path, "older");
  write(path);
  EXPECT_EQ(SafetensorsFile(path).find("t")->elements, 100'000);
  EXPECT_EQ(folder_.names(), std::vector<std::string>{"out.safetensors"});
}

TEST_F(SafetensorsWriting, ALinkIsFollowed) {
  write_bytes(folder_ / "real", "older");
  std::filesystem::create_symlink(folder_ / "real", folder_ / "link");
  write(folder_ / "link");
  EXPECT_TRUE(std::filesystem::is_symlink(folder_ / "link"));
  EXPECT_EQ(SafetensorsFile(folder_ / "real").tensors().size(), 1u);
}

TEST_F(SafetensorsWriting, WhatTheReaderWouldRefuseIsNotWritten) {
  const std::string path = folder_ / "out.safetensors";
  const auto refused = [&](std::vector<io::TensorData> tensors, Strings parts) {
    expect_input_error([&] { io::write_safetensors(path, tensors); }, parts);
    EXPECT_TRUE(folder_.names().empty());
  };
  io::TensorData other = tensor_;
  refused({tensor_, other}, {"'t' is there twice"});
  other.shape = {99'999};
  refused({other}, {"tensor 't' takes 400000 bytes"});
  other.shape = {-1};
  refused({other}, {"tensor 't' has a dimension"});
  other = tensor_;
  other.name = "\xff";
  refused({other}, {"UTF-8"});
}

}  // namespace
}  // namespace moewave::test
