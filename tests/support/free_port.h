// A TCP port that nobody uses.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "moewave/error.h"

namespace moewave::test {

/// Asks the system for one. It stays free for a while: the system hands out others first.
inline int free_port() {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  const bool found = descriptor >= 0 && ::bind(descriptor, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (descriptor >= 0) ::close(descriptor);
  if (!found) throw Error("no free port");
  return ntohs(address.sin_port);
}

}  // namespace moewave::test
