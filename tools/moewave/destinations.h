// The files that a command writes.
#pragma once

#include "options.h"

namespace moewave::cli {

/// Every file to be written must be writable and a file of its own, however it is spelt; throws InputError otherwise.
/// To be called before any work is done; leaves nothing behind.
void check_destinations(const RunOptions& options);

}  // namespace moewave::cli
