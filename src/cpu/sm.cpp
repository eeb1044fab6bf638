#include "cpu/sm.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "protocol/entry.h"

namespace moewave::cpu {
namespace {

using Word = std::atomic_ref<std::uint32_t>;

constexpr int kSpinsBeforeClock = 64;

std::uint32_t load_acquire(const std::uint32_t* word) {
  return Word(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire);
}

}  // namespace

Sm::Sm(const protocol::Layout& layout_in, const EmulatorOptions& options_in, const LayerShape& shape_in,
       const Tuning& tuning_in, protocol::PointerTable peers_in, RankMemory& memory_in, RunState& run_in, int index_in)
    : layout(layout_in),
      options(options_in),
      shape(shape_in),
      tuning(tuning_in),
      peers(peers_in),
      memory(memory_in),
      run(run_in),
      index(index_in),
      tokens_per_rank(static_cast<std::size_t>(peers_in.size)),
      random_(static_cast<std::uint32_t>(options_in.jitter_seed * 1'000'003 + peers_in.rank * 1009 + index_in + 1)) {}

protocol::ScheduleTask Sm::schedule_task() const {
  return {layout.geometry, peers.rank, tokens_per_rank.data(), schedule,
          layout.workspace.scratch(memory.workspace.get())};
}

std::uint32_t* Sm::counter(std::int64_t number) const {
  return own_workspace(layout.workspace.counters) + (epoch & 1u) * layout.counters.size + number;
}

std::uint32_t* Sm::other_counters() const {
  return own_workspace(layout.workspace.counters) + ((epoch + 1) & 1u) * layout.counters.size;
}

void Sm::add(std::int64_t counter_number, std::uint32_t value) {
  raise_stamp(counter(counter_number));
  Word(*counter(counter_number)).fetch_add(value, std::memory_order_release);
}

void Sm::raise(std::uint32_t* flag, std::uint32_t epoch_value) {
  raise_stamp(flag);
  Word(*flag).store(epoch_value, std::memory_order_release);
}

void Sm::wait(const std::uint32_t* word, std::uint32_t wanted, const char* phase, const char* name,
              std::int64_t number) {
  const std::int64_t began = now_ns();
  if (takes_turns_) run.time->publish(rank(), index, LogicalTime::kIdle);
  std::uint32_t seen = load_acquire(word);
  if (protocol::has_reached(seen, wanted)) return end_wait(word, began, number);

  const std::int64_t begin = wall_ns();
  const bool entering = std::strcmp(phase, "entry") == 0;
  const std::int64_t limit_ns = (entering ? options.entry_timeout_ms : options.pipeline_timeout_ms) * 1'000'000;
  const std::uint32_t* abort = own_shared(layout.shared.abort);
  for (std::int64_t spins = 1;; ++spins) {
    seen = load_acquire(word);
    if (protocol::has_reached(seen, wanted)) break;
    if (load_acquire(abort) != 0) throw Stopped();
    if (spins % kSpinsBeforeClock == 0 && wall_ns() - begin > limit_ns) give_up(phase, name, number, wanted, seen);
    std::this_thread::yield();
  }
  end_wait(word, began, number);
}

// The wait took until the word was raised, on the clock of whoever raised it last; polling costs nothing.
void Sm::end_wait(const std::uint32_t* word, std::int64_t began, std::int64_t number) {
  if (!run.time) return;
  thread_ns_ = thread_time_ns();
  clock_ns_ = std::max(began, run.time->raised_at(word));
  if (takes_turns_) run.time->publish(rank(), index, clock_ns_);
  if (clock_ns_ > began) record("wait", began, number);
}

void Sm::wait_for_turn() {
  if (!run.time) return;
  takes_turns_ = true;
  const std::int64_t clock = now_ns();
  run.time->publish(rank(), index, clock);
  while (!run.time->is_first_of_rank(rank(), clock)) {
    if (load_acquire(own_shared(layout.shared.abort)) != 0) throw Stopped();
    std::this_thread::yield();
  }
  thread_ns_ = thread_time_ns();
}

void Sm::leave_turns() {
  if (!takes_turns_) return;
  takes_turns_ = false;
  run.time->publish(rank(), index, LogicalTime::kIdle);
}

void Sm::wait_counter(std::int64_t counter_number, std::int64_t wanted, const char* phase, std::int64_t number) {
  wait(counter(counter_number), static_cast<std::uint32_t>(wanted), phase, phase, number);
}

void Sm::barrier(const char* phase) {
  ++barriers;
  add(layout.counters.arrived);
  wait_counter(layout.counters.arrived, std::int64_t{barriers} * tuning.sms, phase, barriers);
  // The acquire of the last arrival orders everything that the other SMs of this rank wrote before they arrived.
}

void Sm::launch_boundary() {
  raise_stamp(&memory.launches);
  Word(memory.launches).fetch_add(1, std::memory_order_release);
  wait(&memory.launches, static_cast<std::uint32_t>((call_number + 1) * tuning.sms), "launch", "launches", call_number);
}

void Sm::give_up(const char* phase, const char* name, std::int64_t number, std::uint32_t wanted, std::uint32_t seen) {
  {
    const std::lock_guard lock(run.mutex);
    if (!run.record) {
      run.record =
          WaitRecord{rank(), index, role, phase, std::string(name) + "[" + std::to_string(number) + "]", wanted, seen};
    }
  }
  for (int peer = 0; peer < peers.size; ++peer) raise(shared_of(peer, layout.shared.abort), 1);
  throw Stopped();
}

void Sm::raise_stamp(const std::uint32_t* word) {
  if (run.time) run.time->raise(word, now_ns());
}

std::int64_t Sm::now_ns() {
  if (!run.time) return 0;
  const std::int64_t now = thread_time_ns();
  if (thread_ns_ >= 0) clock_ns_ += now - thread_ns_;
  thread_ns_ = now;
  return clock_ns_;
}

std::int64_t Sm::wall_ns() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - run.start).count();
}

void Sm::record(const char* name, std::int64_t begin_ns, std::int64_t number, std::int64_t minibatch) {
  if (!run.time) return;
  events.push_back({rank(), index, call_number, name, number, minibatch, begin_ns, now_ns()});
}

void Sm::jitter() {
  if (options.jitter_us == 0 || random_() % 4 != 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % (options.jitter_us + 1)));
}

void Sm::task_jitter() {
  if (options.jitter_us == 0 || random_() % 64 != 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % (options.jitter_us + 1)));
}

}  // namespace moewave::cpu
