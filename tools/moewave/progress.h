// A line on stderr that says how far long work is, only when stderr is a terminal. Removed when the work ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace moewave::cli {

class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// A share in 0..1. Without any, the line shows the time only.
  void set_share(double share) { share_.store(share, std::memory_order_relaxed); }

 private:
  void draw_until_stopped();

  const std::string label_;
  std::atomic<double> share_{-1};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace moewave::cli
