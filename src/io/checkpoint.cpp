#include "io/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "io/readable_file.h"
#include "io/strict_json.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

namespace fs = std::filesystem;

/// The name alone is judged: that a shard is a link to somewhere else is how download caches work.
bool stays_in_folder(const std::string& shard) {
  const fs::path path(shard);
  return !shard.empty() && shard.find('\0') == std::string::npos && path.is_relative() &&
         std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
}

WeightMap read_index(const std::string& path) {
  const ReadableFile file(path);
  if (file.bytes() > kMaxHeaderBytes) {
    throw InputError(
        fmt::format("{}: the index has {} bytes; allowed: at most {}", quote(path), file.bytes(), kMaxHeaderBytes));
  }
  std::string text(file.bytes(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return parse_index(text, quote(path));
}

}  // namespace

WeightMap parse_index(std::string_view text, const std::string& where) {
  const nlohmann::json json = parse_json_object(text, where);
  const auto found = json.find("weight_map");
  if (found == json.end() || !found->is_object()) {
    throw InputError(fmt::format("{}: has no object weight_map; not the index of a checkpoint", where));
  }
  WeightMap result;
  for (const auto& item : found->items()) {
    if (!item.value().is_string()) {
      throw InputError(fmt::format("{}: the shard of tensor {} is not a string", where, quote(item.key())));
    }
    const auto& shard = item.value().get_ref<const std::string&>();
    if (!stays_in_folder(shard)) {
      throw InputError(fmt::format("{}: the shard {} of tensor {} is not a file in the index's folder", where,
                                   quote(shard), quote(item.key())));
    }
    result.emplace(item.key(), shard);
  }
  return result;
}

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  if (path.ends_with(".json")) {
    weight_map_ = read_index(path);
  } else {
    for (const auto& [name, tensor] : shard("").tensors()) weight_map_.emplace(name, "");
  }
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> result;
  for (const auto& [name, shard] : weight_map_) result.push_back(name);
  return result;
}

const SafetensorsFile& Checkpoint::shard(const std::string& name) {
  std::unique_ptr<SafetensorsFile>& file = files_[name];
  if (!file) {
    const fs::path path(path_);
    file = std::make_unique<SafetensorsFile>(name.empty() ? path_ : (path.parent_path() / name).string());
  }
  return *file;
}

std::map<std::string, TensorRef, NaturalLess> Checkpoint::tensors_under(const std::string& base) {
  std::map<std::string, TensorRef, NaturalLess> result;
  std::set<std::string> shards;
  for (auto entry = weight_map_.lower_bound(base); entry != weight_map_.end(); ++entry) {
    const auto& [name, shard_name] = *entry;
    if (!name.starts_with(base)) break;
    const SafetensorsFile& file = shard(shard_name);
    const TensorInfo* info = file.find(name);
    if (info == nullptr) {
      throw InputError(
          fmt::format("{}: has no tensor {}, which {} lists there", quote(file.path()), quote(name), quote(path_)));
    }
    shards.insert(shard_name);
    result.emplace(name.substr(base.size()), TensorRef{&file, info});
  }
  for (const std::string& shard_name : shards) {
    const SafetensorsFile& file = shard(shard_name);
    for (auto entry = file.tensors().lower_bound(base); entry != file.tensors().end(); ++entry) {
      if (!entry->first.starts_with(base)) break;
      const auto listed = weight_map_.find(entry->first);
      if (listed == weight_map_.end() || listed->second != shard_name) {
        file.refuse(entry->second, fmt::format("is not listed there by {}", quote(path_)));
      }
    }
  }
  return result;
}

}  // namespace moewave::io
