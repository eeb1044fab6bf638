// A model's tensors by name, from one safetensors file or from an index with its shards.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "io/text.h"

namespace moewave::io {

/// A tensor and the file that it lies in, which the Checkpoint owns.
struct TensorRef {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};

/// Which shard holds which tensor: the `weight_map` of an index.
using WeightMap = std::map<std::string, std::string, std::less<>>;

/// Throws InputError when `text` is not an index or a shard's name would leave the index's folder.
WeightMap parse_index(std::string_view text, const std::string& where);

class Checkpoint {
 public:
  /// `path` is read as an index when it ends with ".json". Shards are opened only when a tensor of theirs is asked for,
  /// so that of a large checkpoint only those that hold the layer need to be there.
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;

  /// The tensors whose names begin with `base`, by the rest of their names. Throws InputError when a shard is missing,
  /// lacks a tensor that the index lists there, or holds one under `base` that the index does not list there.
  std::map<std::string, TensorRef, NaturalLess> tensors_under(const std::string& base);

 private:
  const SafetensorsFile& shard(const std::string& name);

  std::string path_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> files_;  // by the shard's name; "" without index
  WeightMap weight_map_;
};

}  // namespace moewave::io
