// Files for tests, and what their refusals must say.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "support/file_maker.h"
#include "support/refusal.h"

namespace moewave::test {

/// The InputError of `call` says each of these.
template <typename Call>
void expect_input_error(Call call, std::initializer_list<std::string_view> parts) {
  const std::string message = refusal(call);
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

}  // namespace moewave::test
