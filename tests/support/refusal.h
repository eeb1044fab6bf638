// The message of a refusal, for tests that look at what it names.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "moewave/error.h"

namespace moewave::test {

/// The one line of the InputError that `action` throws; a failure and an empty text when it throws none.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << "accepted what should be refused";
  return "";
}

}  // namespace moewave::test
