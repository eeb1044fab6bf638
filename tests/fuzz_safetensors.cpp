// libFuzzer entry for everything that reads files. Any bytes are either read to the end, with results whose sizes
// agree, or refused by an InputError of one line.
#include "fuzz_safetensors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>

#include "io/checkpoint.h"
#include "io/layer_files.h"
#include "io/safetensors.h"
#include "moewave/error.h"

namespace moewave::test {
namespace {

void require(bool holds, const char* promise) {
  if (!holds) throw std::logic_error(promise);
}

/// A file in memory that has a path.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    require(descriptor_ >= 0, "a file in memory can be made");
    const ::ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
    require(put == static_cast<::ssize_t>(bytes.size()), "a file in memory can be written");
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return std::string("/proc/self/fd/") + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

bool accepted(const std::function<void()>& read) {
  try {
    read();
    return true;
  } catch (const InputError& error) {
    const std::string_view message = error.what();
    require(!message.empty(), "an error says something");
    require(message.find_first_of("\n\r") == std::string_view::npos, "an error is one line");
    require(message.size() < 4096, "an error is short");
    return false;
  }
}

void read_tensors(const std::string& path) {
  const io::SafetensorsFile file(path);
  for (const auto& [name, tensor] : file.tensors()) {
    const auto elements = static_cast<std::size_t>(tensor.elements);
    require(elements * io::dtype_bits(tensor.dtype) == tensor.bytes * 8, "a tensor has the bytes of its elements");
    switch (tensor.dtype) {
      case io::DType::kBf16:
      case io::DType::kF16:
      case io::DType::kF32: {
        std::vector<Bf16> values(elements);
        file.read(tensor, std::span(values));
        break;
      }
      case io::DType::kI32:
      case io::DType::kI64: {
        std::vector<std::int64_t> values(elements);
        file.read(tensor, std::span(values));
        break;
      }
      default:
        break;
    }
  }
}

void read_weights(const std::string& path, const char* prefix) {
  const io::LoadedWeights loaded = io::load_weights(path, prefix);
  const auto size = [](std::int64_t a, std::int64_t b, std::int64_t c) { return static_cast<std::size_t>(a * b * c); };
  const std::size_t down = size(loaded.experts, loaded.hidden, loaded.intermediate);
  const std::size_t shared = size(1, loaded.hidden, loaded.shared_intermediate);
  require(down > 0, "weights are not empty");
  require(loaded.weights.down.size() == down && loaded.weights.gate_up.size() == 2 * down, "weights fit their shape");
  require(loaded.weights.shared_gate.size() == shared && loaded.weights.shared_up.size() == shared &&
              loaded.weights.shared_down.size() == shared,
          "shared weights fit their shape");
}

void read_inputs(const std::string& path) {
  const io::LoadedInputs loaded = io::load_inputs(path);
  const HostBatch& batch = loaded.batch;
  require(loaded.hidden > 0 && loaded.topk > 0, "a token has values and routes");
  const std::size_t tokens = batch.hidden_states.size() / static_cast<std::size_t>(loaded.hidden);
  require(batch.topk_ids.size() == tokens * static_cast<std::size_t>(loaded.topk), "ids fit the tokens");
  require(batch.topk_weights.size() == batch.topk_ids.size(), "router weights fit the ids");
  require(batch.grad_output.empty() || batch.grad_output.size() == batch.hidden_states.size(), "gradients fit");
  for (const std::int32_t id : batch.topk_ids) require(id >= -1, "ids are at least -1");
  std::uint64_t sum = 0;
  for (const std::int64_t count : batch.tokens_per_rank) sum += static_cast<std::uint64_t>(count);
  require(batch.tokens_per_rank.empty() || sum == tokens, "tokens_per_rank sums to the tokens");
}

}  // namespace

FuzzOutcome fuzz_one(std::string_view bytes) {
  const MemoryFile file(bytes);
  FuzzOutcome outcome;
  outcome.safetensors = accepted([&] { read_tensors(file.path()); });
  if (outcome.safetensors) {
    const bool without_prefix = accepted([&] { read_weights(file.path(), ""); });
    outcome.weights = accepted([&] { read_weights(file.path(), "mlp"); }) || without_prefix;
    outcome.inputs = accepted([&] { read_inputs(file.path()); });
  }
  outcome.index = accepted([&] { io::parse_index(bytes, "index"); });
  return outcome;
}

}  // namespace moewave::test
