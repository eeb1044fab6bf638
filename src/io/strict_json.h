// JSON as file headers need it: no key twice, no deep nesting, valid UTF-8.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace moewave::io {

/// Parses `text`, which must be one JSON object. Throws InputError that begins with `where`.
nlohmann::json parse_json_object(std::string_view text, const std::string& where);

}  // namespace moewave::io
