// What a kernel told its host, as exceptions.
#pragma once

#include <cstdint>

#include "kernels/sm90/host_words.h"
#include "moewave/error.h"
#include "protocol/geometry.h"

namespace moewave {

/// The record of a rank whose wait was too long.
WaitRecord wait_record(int rank, const sm90::StopRecord& stop);

[[noreturn]] void throw_timeout(const WaitRecord& record);

/// Throws what the words hold besides the stop record, as CudaLayer::check() says; nothing if there is nothing.
void throw_verdict(const sm90::HostWords& words, const protocol::Geometry& geometry);
void throw_bad_route(const sm90::HostWords& words, const protocol::Geometry& geometry);

}  // namespace moewave
