#include "io/safetensors_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/atomic_file.h"
#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

constexpr std::size_t kHeaderMultiple = 64;

std::vector<const TensorData*> widest_first(std::span<const TensorData> tensors) {
  std::vector<const TensorData*> order;
  for (const TensorData& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorData* a, const TensorData* b) {
    return dtype_bits(a->dtype) > dtype_bits(b->dtype);
  });
  return order;
}

std::string make_header(std::span<const TensorData* const> order) {
  nlohmann::json json = nlohmann::json::object();
  std::uint64_t offset = 0;
  for (const TensorData* tensor : order) {
    const std::uint64_t end = offset + tensor->bytes.size();
    const auto [place, is_new] =
        json.emplace(tensor->name, nlohmann::json{{"dtype", std::string(dtype_name(tensor->dtype))},
                                                  {"shape", tensor->shape},
                                                  {"data_offsets", {offset, end}}});
    if (!is_new) throw InputError(fmt::format("tensor {} is there twice", quote(tensor->name)));
    offset = end;
  }
  std::string header;
  try {
    header = json.dump();
  } catch (const nlohmann::json::type_error&) {
    throw InputError("a tensor's name is not valid UTF-8");
  }
  const std::size_t unpadded = sizeof(std::uint64_t) + header.size();
  header.append((kHeaderMultiple - unpadded % kHeaderMultiple) % kHeaderMultiple, ' ');
  return header;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const TensorData> tensors) {
  const std::vector<const TensorData*> order = widest_first(tensors);
  const std::string header = make_header(order);
  const std::uint64_t length = header.size();
  std::uint64_t data_bytes = 0;
  for (const TensorData* tensor : order) data_bytes += tensor->bytes.size();
  parse_header(header, sizeof(length) + length, data_bytes, quote(path));  // what the reader refuses is never written

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  for (const TensorData* tensor : order) file.write(tensor->bytes);
  file.commit();
}

}  // namespace moewave::io
