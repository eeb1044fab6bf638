// Compute: every SM takes task numbers from a ticket until none is left. Communicating SMs join when their pulls are
// done.
#include "protocol/tasks.h"

#include "cpu/sm.h"

namespace moewave::cpu {

void run_tasks(Sm& sm) {
  sm.role = "compute";
  const protocol::TaskOrder order(sm.layout.geometry, sm.schedule, static_cast<std::int32_t>(sm.call->tokens),
                                  sm.call->backward);
  const std::int64_t tasks = order.size();
  std::atomic_ref<std::uint32_t> ticket(*sm.counter(sm.layout.counters.ticket));
  for (;;) {
    sm.wait_for_turn();
    // Relaxed: a ticket orders nothing; every task waits for its inputs by their own counters.
    const std::uint32_t number = ticket.fetch_add(1, std::memory_order_relaxed);
    if (number >= tasks) return sm.leave_turns();
    sm.task_jitter();
    const protocol::Task task = order.task(number);
    if (sm.call->backward) {
      run_backward_task(sm, order, task);
    } else {
      run_forward_task(sm, order, task);
    }
  }
}

}  // namespace moewave::cpu
