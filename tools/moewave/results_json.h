// The result of a run for programs; fields are documented in docs/json.md.
#pragma once

#include <string>

#include "tables.h"

namespace moewave::cli {

std::string result_json(const Report& report);

}  // namespace moewave::cli
