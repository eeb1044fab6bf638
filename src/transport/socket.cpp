#include "transport/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <thread>

#include "moewave/error.h"

namespace moewave {
namespace {

constexpr auto kBetweenAttempts = std::chrono::milliseconds(20);

[[noreturn]] void fail(int error) { throw Error(std::generic_category().message(error)); }

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

int new_socket(int family) {
  const int descriptor = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) fail(errno);
  return descriptor;
}

void send_at_once(int descriptor) {
  const int on = 1;
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

std::unique_ptr<addrinfo, FreeAddresses> resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (status != 0) throw Error(::gai_strerror(status));
  return std::unique_ptr<addrinfo, FreeAddresses>(list);
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

void Socket::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void Socket::wait(short events, Deadline deadline) const {
  pollfd entry{descriptor_, events, 0};
  while (true) {
    const int ready = ::poll(&entry, 1, milliseconds_until(deadline));
    if (ready > 0) return;
    if (ready == 0) throw Error("timed out");
    if (errno != EINTR) fail(errno);
  }
}

Socket Socket::listen_on(int port) {
  // One socket for both address families; machines without IPv6 get one for IPv4.
  int descriptor = ::socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool is_ipv6 = descriptor >= 0;
  Socket listener(is_ipv6 ? descriptor : new_socket(AF_INET));
  const int on = 1;
  const int off = 0;
  ::setsockopt(listener.descriptor_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<std::uint16_t>(port));
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_port = any6.sin6_port;
  if (is_ipv6) ::setsockopt(listener.descriptor_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  const int bound = is_ipv6 ? ::bind(listener.descriptor_, reinterpret_cast<sockaddr*>(&any6), sizeof(any6))
                            : ::bind(listener.descriptor_, reinterpret_cast<sockaddr*>(&any4), sizeof(any4));
  if (bound != 0 || ::listen(listener.descriptor_, SOMAXCONN) != 0) fail(errno);
  return listener;
}

Socket Socket::accept(Deadline deadline) const {
  while (true) {
    wait(POLLIN, deadline);
    const int descriptor = ::accept4(descriptor_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (descriptor >= 0) {
      send_at_once(descriptor);
      return Socket(descriptor);
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) fail(errno);
  }
}

Socket Socket::connect_to(const std::string& address, int port, Deadline deadline) {
  int last_error = ETIMEDOUT;
  while (true) {
    const auto addresses = resolve(address, port);
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      Socket socket(new_socket(a->ai_family));
      int error = ::connect(socket.descriptor_, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        socket.wait(POLLOUT, deadline);
        socklen_t size = sizeof(error);
        ::getsockopt(socket.descriptor_, SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error == 0) {
        send_at_once(socket.descriptor_);
        return socket;
      }
      last_error = error;
    }
    if (std::chrono::steady_clock::now() + kBetweenAttempts >= deadline) {
      throw Error("timed out (" + std::generic_category().message(last_error) + ")");
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

void Socket::send(std::string_view bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    wait(POLLOUT, deadline);
    const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) bytes.remove_prefix(static_cast<std::size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
      if (errno == EPIPE || errno == ECONNRESET) throw Error("connection closed");
      fail(errno);
    }
  }
}

std::string Socket::receive(std::size_t count, Deadline deadline) const {
  std::string bytes(count, '\0');
  std::size_t have = 0;
  while (have < count) {
    wait(POLLIN, deadline);
    const ssize_t got = ::recv(descriptor_, bytes.data() + have, count - have, 0);
    if (got > 0) have += static_cast<std::size_t>(got);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) throw Error("connection closed");
    if (got < 0 && errno != EAGAIN && errno != EINTR) fail(errno);
  }
  return bytes;
}

}  // namespace moewave
