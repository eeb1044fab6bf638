// Data-parallel loops of the host code that is not part of the emulated kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace moewave {

/// Calls body(0) to body(count - 1), each once, on as many threads as the machine has cores, in no fixed order. The
/// calls must not write what another reads or writes. The first exception is thrown again here, after all threads
/// ended.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body);

}  // namespace moewave
