#include "transport/together.h"

#include <exception>
#include <string>

#include "moewave/error.h"

namespace moewave {
namespace {

// The first character of what a process reports; the text of the failure follows.
constexpr char kSuccess = 's';
constexpr char kInputError = 'i';
constexpr char kError = 'e';

}  // namespace

void together(ProcessGroup& group, const std::function<void()>& work) {
  std::string outcome(1, kSuccess);
  std::exception_ptr own;
  try {
    work();
  } catch (const InputError& error) {
    own = std::current_exception();
    outcome = kInputError + std::string(error.what());
  } catch (const std::exception& error) {
    own = std::current_exception();
    outcome = kError + std::string(error.what());
  }
  const std::vector<std::string> outcomes = group.all_gather(outcome);
  if (own) std::rethrow_exception(own);
  for (std::size_t process = 0; process < outcomes.size(); ++process) {
    const std::string& theirs = outcomes[process];
    if (!theirs.empty() && theirs[0] == kSuccess) continue;
    const std::string text =
        "process " + std::to_string(process) + ": " + (theirs.empty() ? "no answer" : theirs.substr(1));
    if (!theirs.empty() && theirs[0] == kInputError) throw InputError(text);
    throw Error(text);
  }
}

}  // namespace moewave
