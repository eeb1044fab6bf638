#include "support/schedule_builder.h"

#include <barrier>
#include <thread>

namespace moewave::test {

void BuiltSchedule::build(const AllIds& ids, int workers) {
  std::barrier barrier(workers);
  const protocol::ScheduleTask schedule_task = task();
  const auto work = [&](int worker) {
    protocol::PlaceScratch places;
    protocol::build_schedule<protocol::SingleLane>(
        schedule_task, worker, workers, places,
        [&](int source) { return ids[static_cast<std::size_t>(source)].data(); },
        [&] {
          barrier.arrive_and_wait();
          return true;
        });
  };
  std::vector<std::jthread> others;
  for (int worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
  work(0);
}

}  // namespace moewave::test
