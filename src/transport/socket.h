// Messages over TCP, every step with a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace moewave {

using Deadline = std::chrono::steady_clock::time_point;

/// A connection or a listener. Closed when destroyed. All functions throw Error with the reason in a few words ("timed
/// out", "connection closed", the system's text), to which the caller adds who and what.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  Socket& operator=(Socket&& other) noexcept;

  bool is_open() const { return descriptor_ >= 0; }
  void close();

  static Socket listen_on(int port);
  Socket accept(Deadline deadline) const;
  /// Tries again until somebody listens there.
  static Socket connect_to(const std::string& address, int port, Deadline deadline);

  void send(std::string_view bytes, Deadline deadline) const;
  /// Exactly `count` bytes.
  std::string receive(std::size_t count, Deadline deadline) const;

 private:
  void wait(short events, Deadline deadline) const;

  int descriptor_ = -1;
};

}  // namespace moewave
