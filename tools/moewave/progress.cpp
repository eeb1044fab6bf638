#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace moewave::cli {

namespace {
constexpr auto kInterval = std::chrono::milliseconds(200);
constexpr const char* kEraseLine = "\r\x1b[K";
}  // namespace

Progress::Progress(std::string label) : label_(std::move(label)) {
  if (isatty(STDERR_FILENO) != 0) thread_ = std::thread([this] { draw_until_stopped(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Progress::draw_until_stopped() {
  const auto start = std::chrono::steady_clock::now();
  bool drawn = false;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kInterval, [this] { return stopped_; })) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double share = share_.load(std::memory_order_relaxed);
    const std::string percent = share < 0 ? "" : fmt::format(" {:.0f} %", share * 100);
    fmt::print(stderr, "{}{}{}, {:.1f} s", kEraseLine, label_, percent, seconds);
    std::fflush(stderr);
    drawn = true;
  }
  if (drawn) fmt::print(stderr, "{}", kEraseLine);
}

}  // namespace moewave::cli
