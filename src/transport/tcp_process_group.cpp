// A star of TCP connections: process 0 gathers what the others send and sends the whole back.
#include <algorithm>
#include <cstring>
#include <utility>

#include "moewave/error.h"
#include "moewave/process_group.h"
#include "transport/socket.h"

namespace moewave {
namespace {

constexpr std::uint32_t kMagic = 0x6d777067;  // tells a stray connection from a member
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 28;
constexpr std::uint32_t kHelloExchange = 0;  // the answer to a Hello: empty, or why this group cannot be
constexpr std::uint32_t kFirstExchange = 1;

Deadline deadline_after(std::int64_t milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

// How a new connection introduces itself.
struct Hello {
  std::uint32_t magic;
  std::int32_t process;
  std::int32_t processes;
};

struct FrameHeader {
  std::uint32_t magic;
  std::uint32_t number;  // of the exchange
  std::uint64_t bytes;
};

template <typename T>
std::string to_bytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(T));
}
template <typename T>
T from_bytes(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

void send_frame(const Socket& socket, std::uint32_t number, std::string_view bytes, Deadline deadline) {
  std::string message = to_bytes(FrameHeader{kMagic, number, bytes.size()});
  message += bytes;
  socket.send(message, deadline);
}

struct Frame {
  std::uint32_t number;
  std::string bytes;
};

Frame receive_frame(const Socket& socket, Deadline deadline) {
  const auto header = from_bytes<FrameHeader>(socket.receive(sizeof(FrameHeader), deadline));
  if (header.magic != kMagic || header.bytes > kMostBytes) throw Error("sent something else than moewave does");
  return {header.number, socket.receive(static_cast<std::size_t>(header.bytes), deadline)};
}

std::string expect_number(Frame frame, std::uint32_t number) {
  if (frame.number == number) return std::move(frame.bytes);
  throw Error("is at exchange " + std::to_string(frame.number) + ", this process at " + std::to_string(number));
}

// Several texts as one.
std::string join(const std::vector<std::string>& parts) {
  std::string whole;
  for (const std::string& part : parts) whole += to_bytes(std::uint64_t{part.size()}) + part;
  return whole;
}
std::vector<std::string> split(std::string_view whole) {
  std::vector<std::string> parts;
  while (whole.size() >= sizeof(std::uint64_t)) {
    const auto size = static_cast<std::size_t>(from_bytes<std::uint64_t>(whole));
    whole.remove_prefix(sizeof(std::uint64_t));
    parts.emplace_back(whole.substr(0, size));
    whole.remove_prefix(std::min(size, whole.size()));
  }
  return parts;
}

class TcpProcessGroup final : public ProcessGroup {
 public:
  explicit TcpProcessGroup(const ProcessGroupOptions& options) : options_(options) {
    peers_.resize(static_cast<std::size_t>(options.processes));
    if (options.processes == 1) return;
    if (options.process == 0) {
      listen();
    } else {
      connect();
    }
    // Nobody goes on before all are known to be there.
    barrier();
  }

  int process() const override { return options_.process; }
  int processes() const override { return options_.processes; }

  std::vector<std::string> all_gather(std::string_view bytes) override {
    if (options_.processes == 1) return {std::string(bytes)};
    if (is_closed_) throw Error("the process group is closed after an earlier failure");
    const std::uint32_t number = exchange_++;
    try {
      return options_.process == 0 ? gather_all(number, bytes) : send_and_receive(number, bytes);
    } catch (...) {
      close();
      throw;
    }
  }

 private:
  [[noreturn]] void fail(int process, const std::string& what) const {
    throw Error("process " + std::to_string(process) + " of " + std::to_string(options_.processes) + ", seen from " +
                std::to_string(options_.process) + ": " + what + " (limit " + std::to_string(options_.timeout_ms) +
                " ms)");
  }

  std::string where() const { return options_.address + ":" + std::to_string(options_.port); }

  Socket& peer(int process) { return peers_[static_cast<std::size_t>(process)]; }

  void listen() {
    Socket listener;
    try {
      listener = Socket::listen_on(options_.port);
    } catch (const Error& error) {
      throw Error("process 0 cannot listen on port " + std::to_string(options_.port) + ": " + error.what());
    }
    const Deadline deadline = deadline_after(options_.timeout_ms);
    for (int missing = options_.processes - 1; missing > 0;) missing -= admit(listener, deadline) ? 1 : 0;
  }

  // False: a stranger, or one that left at once.
  bool admit(const Socket& listener, Deadline deadline) {
    Socket socket;
    Hello hello{};
    try {
      socket = listener.accept(deadline);
    } catch (const Error& error) {
      std::string missing;
      for (int p = 1; p < options_.processes; ++p) {
        if (!peer(p).is_open()) missing += (missing.empty() ? "" : ", ") + std::to_string(p);
      }
      throw Error("processes that did not come to " + where() + " within " + std::to_string(options_.timeout_ms) +
                  " ms: " + missing + " (" + error.what() + ")");
    }
    try {
      hello = from_bytes<Hello>(socket.receive(sizeof(Hello), deadline));
    } catch (const Error&) {
      return false;
    }
    if (hello.magic != kMagic) return false;
    const std::string refusal = objection(hello);
    try {
      send_frame(socket, kHelloExchange, refusal, deadline);
    } catch (const Error&) {
      if (refusal.empty()) return false;
    }
    if (!refusal.empty()) {
      for (Socket& other : peers_) {
        try {
          if (other.is_open()) send_frame(other, kHelloExchange, refusal, deadline);
        } catch (const Error&) {  // it is gone; the others still hear of it
        }
      }
      throw InputError(refusal);
    }
    peer(hello.process) = std::move(socket);
    return true;
  }

  std::string objection(const Hello& hello) {
    if (hello.processes != options_.processes) {
      return "process " + std::to_string(hello.process) + " says there are " + std::to_string(hello.processes) +
             " processes, process 0 says " + std::to_string(options_.processes) + "; they must agree";
    }
    if (hello.process < 1 || hello.process >= options_.processes) {
      return "a process says it is number " + std::to_string(hello.process) + "; it must be 1 to " +
             std::to_string(options_.processes - 1) + ", process 0 being the one that listens";
    }
    if (peer(hello.process).is_open()) {
      return "two processes say they are number " + std::to_string(hello.process) + "; each must have its own";
    }
    return {};
  }

  void connect() {
    const Deadline deadline = deadline_after(options_.timeout_ms);
    std::string refusal;
    try {
      peer(0) = Socket::connect_to(options_.address, options_.port, deadline);
      peer(0).send(to_bytes(Hello{kMagic, options_.process, options_.processes}), deadline);
      refusal = expect_number(receive_frame(peer(0), deadline), kHelloExchange);
    } catch (const Error& error) {
      throw Error("process " + std::to_string(options_.process) + " cannot reach process 0 at " + where() + " within " +
                  std::to_string(options_.timeout_ms) + " ms: " + error.what());
    }
    if (!refusal.empty()) throw InputError(refusal);
  }

  std::vector<std::string> gather_all(std::uint32_t number, std::string_view bytes) {
    const Deadline deadline = deadline_after(options_.timeout_ms);
    std::vector<std::string> parts(static_cast<std::size_t>(options_.processes));
    parts[0] = bytes;
    for (int p = 1; p < options_.processes; ++p) {
      with_peer(p,
                [&] { parts[static_cast<std::size_t>(p)] = expect_number(receive_frame(peer(p), deadline), number); });
    }
    const std::string whole = join(parts);
    for (int p = 1; p < options_.processes; ++p) with_peer(p, [&] { send_frame(peer(p), number, whole, deadline); });
    return parts;
  }

  std::vector<std::string> send_and_receive(std::uint32_t number, std::string_view bytes) {
    const Deadline deadline = deadline_after(options_.timeout_ms);
    std::vector<std::string> parts;
    with_peer(0, [&] { send_frame(peer(0), number, bytes, deadline); });
    std::string refusal;
    with_peer(0, [&] {
      Frame frame = receive_frame(peer(0), deadline);
      // While others still come, process 0 may send the refusal of one of them, which all must hear.
      if (frame.number == kHelloExchange && number == kFirstExchange) return void(refusal = std::move(frame.bytes));
      parts = split(expect_number(std::move(frame), number));
    });
    if (!refusal.empty()) throw InputError(refusal);
    if (parts.size() != peers_.size()) fail(0, "sent no list of all processes");
    return parts;
  }

  template <typename Action>
  void with_peer(int process, Action&& action) const {
    try {
      action();
    } catch (const Error& error) {
      fail(process, error.what());
    }
  }

  void close() {
    is_closed_ = true;
    for (Socket& socket : peers_) socket.close();
  }

  ProcessGroupOptions options_;
  std::vector<Socket> peers_;  // by process; process 0 has all, the others have 0
  std::uint32_t exchange_ = kFirstExchange;
  bool is_closed_ = false;
};

void check(const ProcessGroupOptions& options) {
  const auto require = [](const char* name, std::int64_t value, std::int64_t min, std::int64_t max) {
    if (value >= min && value <= max) return;
    throw InputError("process group: " + std::string(name) + " is " + std::to_string(value) + "; it must be " +
                     std::to_string(min) + " to " + std::to_string(max));
  };
  require("processes", options.processes, 1, 1024);
  require("process", options.process, 0, options.processes - 1);
  require("port", options.port, 1, 65535);
  require("timeout_ms", options.timeout_ms, 1, 1'000'000'000);
}

}  // namespace

std::shared_ptr<ProcessGroup> join_process_group(const ProcessGroupOptions& options) {
  check(options);
  return std::make_shared<TcpProcessGroup>(options);
}

}  // namespace moewave
