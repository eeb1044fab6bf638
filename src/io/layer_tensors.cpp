#include "io/layer_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

constexpr std::string_view kExperts = "experts.";

bool take_front(std::string_view& text, std::string_view front) {
  if (!text.starts_with(front)) return false;
  text.remove_prefix(front.size());
  return true;
}

std::string join_quotes(const std::vector<std::string>& names, std::size_t limit) {
  std::string result;
  for (std::size_t i = 0; i < std::min(names.size(), limit); ++i) {
    result += (i == 0 ? "" : ", ") + quote(names[i]);
  }
  if (names.size() > limit) result += fmt::format(" and {} more", names.size() - limit);
  return result;
}

// ---- Where the layers are
// ---------------------------------------------------------------------------------------------

/// Prefixes of tensors named "<prefix>.experts.<something>".
std::vector<std::string> layer_prefixes(const std::vector<std::string>& names) {
  std::set<std::string, NaturalLess> found;
  for (const std::string& name : names) {
    for (std::size_t at = name.find(kExperts); at != std::string::npos; at = name.find(kExperts, at + 1)) {
      if (at != 0 && name[at - 1] != '.') continue;
      found.insert(at == 0 ? "" : name.substr(0, at - 1));
      break;
    }
  }
  return {found.begin(), found.end()};
}

/// Says where experts are instead: first of all the prefixes that `prefix` is a part of or goes beyond.
std::string suggest(const std::vector<std::string>& layers, const std::string& prefix) {
  if (layers.empty()) return "no tensor in it is named like an expert's";
  std::vector<std::string> close;
  for (const std::string& layer : layers) {
    if (layer.starts_with(prefix + ".") || prefix.starts_with(layer + ".")) close.push_back(layer);
  }
  const std::vector<std::string>& shown = close.empty() ? layers : close;
  if (shown.size() == 1 && shown[0].empty()) return "experts are there without a prefix";
  if (shown.size() == 1) return fmt::format("experts are there under the prefix {}", quote(shown[0]));
  return "experts are there under the prefixes " + join_quotes(shown, 4);
}

void require_layer(const Checkpoint& checkpoint, const std::string& prefix) {
  const std::vector<std::string> layers = layer_prefixes(checkpoint.names());
  if (std::find(layers.begin(), layers.end(), prefix) != layers.end()) return;
  const std::string where = prefix.empty() ? "no experts without a prefix" : "no experts under prefix " + quote(prefix);
  throw InputError(fmt::format("{}: {}; {}", quote(checkpoint.path()), where, suggest(layers, prefix)));
}

// ---- What a tensor is
// -------------------------------------------------------------------------------------------------

/// The names of the three projections, in the order gate, up, down, in the two customs that exist.
struct ProjectionNames {
  std::array<std::string_view, 3> names;
};
constexpr ProjectionNames kProjNames{{"gate_proj.weight", "up_proj.weight", "down_proj.weight"}};
constexpr ProjectionNames kNumberedNames{{"w1.weight", "w3.weight", "w2.weight"}};

std::optional<std::size_t> projection(std::string_view name, const ProjectionNames& custom) {
  const auto found = std::find(custom.names.begin(), custom.names.end(), name);
  if (found == custom.names.end()) return std::nullopt;
  return static_cast<std::size_t>(found - custom.names.begin());
}

bool is_router(std::string_view name) {
  return name == "gate.weight" || name == "gate.bias" || name == "gate.e_score_correction_bias" ||
         name.starts_with("router.");
}

/// Why a tensor that is none of the layer's is refused.
std::string_view why_refused(std::string_view name) {
  const auto ends = [name](std::initializer_list<std::string_view> tails) {
    return std::any_of(tails.begin(), tails.end(), [name](std::string_view tail) { return name.ends_with(tail); });
  };
  if (name == "shared_expert_gate.weight") return "is a gate on the shared expert, which is not supported";
  if (ends({"bias"})) return "is a bias, which is not supported";
  if (ends({"scale", "scale_inv", "scales", "scale_2", "blocks", "qweight", "qzeros", "g_idx", "packed"})) {
    return "belongs to quantised weights, which are not supported; dequantise them first";
  }
  return "is unknown and might change the result; supported are experts, shared expert and router (docs/files.md)";
}

// ---- Collecting them
// --------------------------------------------------------------------------------------------------

/// Sorts the tensors under a prefix into a LayerTensors.
class Collector {
 public:
  void add(std::string_view name, const TensorRef& tensor) {
    std::string_view rest = name;
    if (is_router(name)) {
      routers_.push_back(tensor.info->name);
    } else if (take_front(rest, "shared_expert.")) {
      add_shared(rest, tensor, "shared_expert.");
    } else if (take_front(rest, "shared_experts.")) {
      add_shared(rest, tensor, "shared_experts.");
    } else if (take_front(rest, kExperts)) {
      add_expert(rest, tensor);
    } else {
      tensor.file->refuse(*tensor.info, std::string(why_refused(name)));
    }
  }

  LayerTensors finish(const std::string& where) {
    if (layer_.stacked_gate_up.info != nullptr && layer_.stacked_down.info == nullptr)
      missing(where, "experts.down_proj");
    if (layer_.stacked_down.info != nullptr && layer_.stacked_gate_up.info == nullptr) {
      missing(where, "experts.gate_up_proj");
    }
    finish_experts(where);
    if (layer_.has_shared) require_all(where, std::string(shared_front_), layer_.shared, kProjNames);
    if (!routers_.empty()) {
      layer_.notes.push_back("left aside, as routing is an input: " + join_quotes(routers_, 4));
    }
    return std::move(layer_);
  }

 private:
  [[noreturn]] static void missing(const std::string& where, const std::string& name) {
    throw InputError(fmt::format("{}: tensor {} is missing", where, quote(name)));
  }

  static void require_all(const std::string& where, const std::string& front, const Projections& projections,
                          const ProjectionNames& custom) {
    for (std::size_t i = 0; i < projections.size(); ++i) {
      if (projections[i].info == nullptr) missing(where, front + std::string(custom.names[i]));
    }
  }

  void add_shared(std::string_view rest, const TensorRef& tensor, std::string_view front) {
    const auto which = projection(rest, kProjNames);
    if (!which) tensor.file->refuse(*tensor.info, std::string(why_refused(rest)));
    if (layer_.has_shared && shared_front_ != front) {
      tensor.file->refuse(*tensor.info,
                          "is there beside a shared expert of the other name; allowed: one of shared_expert. "
                          "and shared_experts.");
    }
    layer_.has_shared = true;
    shared_front_ = front;
    layer_.shared[*which] = tensor;
  }

  void add_expert(std::string_view rest, const TensorRef& tensor) {
    if (rest == "gate_up_proj" || rest == "down_proj") {
      require_layout(Layout::kStacked, tensor);
      (rest == "down_proj" ? layer_.stacked_down : layer_.stacked_gate_up) = tensor;
      return;
    }
    std::string_view name = rest;
    const std::optional<std::int64_t> number = take_expert_number(name);
    if (const auto which = projection(name, kProjNames); number && which) {
      require_layout(Layout::kProj, tensor);
      by_number_[*number][*which] = tensor;
    } else if (const auto numbered = projection(name, kNumberedNames); number && numbered) {
      require_layout(Layout::kNumbered, tensor);
      by_number_[*number][*numbered] = tensor;
    } else {
      tensor.file->refuse(*tensor.info, std::string(why_refused(rest)));
    }
  }

  /// "17." at the front of `name`, written without leading zeros; removes it.
  static std::optional<std::int64_t> take_expert_number(std::string_view& name) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc() || number < 0) return std::nullopt;
    if (!take_front(name, std::to_string(number) + ".")) return std::nullopt;
    return number;
  }

  enum class Layout { kNone, kStacked, kProj, kNumbered };

  void require_layout(Layout layout, const TensorRef& tensor) {
    if (layout_ == Layout::kNone) {
      layout_ = layout;
      first_of_layout_ = tensor.info->name;
    } else if (layout_ != layout) {
      tensor.file->refuse(*tensor.info, fmt::format("is of another layout than {}; allowed: one layout in a layer",
                                                    quote(first_of_layout_)));
    }
  }

  void finish_experts(const std::string& where) {
    const ProjectionNames& custom = layout_ == Layout::kNumbered ? kNumberedNames : kProjNames;
    for (const auto& [number, projections] : by_number_) {
      const auto next = static_cast<std::int64_t>(layer_.experts.size());
      if (number != next) {
        throw InputError(
            fmt::format("{}: expert {} is missing; experts up to {} are there, numbers begin at 0 without gap", where,
                        next, by_number_.rbegin()->first));
      }
      require_all(where, fmt::format("experts.{}.", number), projections, custom);
      layer_.experts.push_back(projections);
    }
  }

  LayerTensors layer_;
  Layout layout_ = Layout::kNone;
  std::string first_of_layout_;
  std::map<std::int64_t, Projections> by_number_;
  std::string_view shared_front_;
  std::vector<std::string> routers_;
};

}  // namespace

LayerTensors find_layer(Checkpoint& checkpoint, const std::string& prefix) {
  const std::string bare = prefix.ends_with('.') ? prefix.substr(0, prefix.size() - 1) : prefix;
  require_layer(checkpoint, bare);
  Collector collector;
  for (const auto& [name, tensor] : checkpoint.tensors_under(bare.empty() ? "" : bare + ".")) {
    collector.add(name, tensor);
  }
  const std::string where = quote(checkpoint.path());
  return collector.finish(bare.empty() ? where : where + ": layer " + quote(bare));
}

}  // namespace moewave::io
