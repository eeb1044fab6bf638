#include "io/strict_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "io/text.h"
#include "moewave/error.h"

namespace moewave::io {
namespace {

using Json = nlohmann::json;

// A tensor entry is an object in an object with arrays inside: 3. Some room for what tools put beside it.
constexpr int kMaxDepth = 16;

/// Watches the parse. The library itself would keep the last of two equal keys, silently.
class Watch {
 public:
  explicit Watch(const std::string& where) : where_(where) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    using Event = Json::parse_event_t;
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kMaxDepth) {
      throw InputError(fmt::format("{}: JSON is nested deeper than {} levels", where_, kMaxDepth));
    }
    if (event == Event::object_start) {
      keys_.emplace_back();
    } else if (event == Event::object_end) {
      keys_.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) {
        throw InputError(fmt::format("{}: key {} is there twice", where_, quote(key)));
      }
    }
    return true;
  }

 private:
  const std::string& where_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
};

}  // namespace

nlohmann::json parse_json_object(std::string_view text, const std::string& where) {
  try {
    Watch watch(where);
    Json result = Json::parse(
        text.begin(), text.end(),
        [&watch](int depth, Json::parse_event_t event, const Json& parsed) { return watch(depth, event, parsed); });
    if (!result.is_object()) throw InputError(fmt::format("{}: is JSON but not an object", where));
    return result;
  } catch (const Json::parse_error& error) {
    throw InputError(fmt::format("{}: is not valid JSON near byte {}", where, error.byte));
  } catch (const Json::exception&) {
    throw InputError(fmt::format("{}: holds a number that is out of range", where));
  }
}

}  // namespace moewave::io
