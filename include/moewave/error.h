// Exceptions of the library. Every message is one line that says what, where and what is allowed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace moewave {

/// A failure while running (time-out, out of memory, broken invariant). The program exits with 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Bad input or an unsupported request, found before any work was done. The program exits with 2.
class InputError : public Error {
 public:
  using Error::Error;
};

/// What a stuck wait was waiting for.
struct WaitRecord {
  int rank = -1;
  int sm = -1;
  std::string role;         ///< for instance "dispatch", "gemm1", "merge"
  std::string phase;        ///< for instance "entry", "pull", "h ring"
  std::string waiting_for;  ///< the counter or flag, with its index
  std::uint64_t wanted = 0;
  std::uint64_t seen = 0;
};

/// A wait ran past its limit; every rank of the layer stopped. `record` is that of the first rank that gave up.
class TimeoutError : public Error {
 public:
  TimeoutError(const std::string& what, WaitRecord record) : Error(what), record_(std::move(record)) {}
  const WaitRecord& record() const { return record_; }

 private:
  WaitRecord record_;
};

}  // namespace moewave
