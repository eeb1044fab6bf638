// Promise: the GPU builds the schedule that the host builds, bit for bit, on any number of blocks; and sizes and
// offsets are the same on both. Prints a table of times. Exit code 0: all equal, 1: a difference or a CUDA error, 77:
// not run.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/sm90/schedule_kernel.h"
#include "protocol/layout.h"
#include "support/schedule_builder.h"

namespace moewave::test {
namespace {

constexpr int kNotRun = 77;
constexpr int kRandomCases = 300;
constexpr int kTimedLaunches = 50;
constexpr std::uint64_t kBarrierLimitNs = 10'000'000'000;
constexpr const char* kPhases[] = {"count", "cut", "offsets", "groups", "place", "finish"};

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct CudaFree {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <typename T>
using DeviceArray = std::unique_ptr<T, CudaFree>;

template <typename T>
DeviceArray<T> device_array(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  return DeviceArray<T>(static_cast<T*>(memory));
}

template <typename T>
void copy(T* to, const T* from, std::size_t count) {
  if (count > 0) check(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
}

template <typename T>
DeviceArray<T> on_device(const std::vector<T>& values) {
  DeviceArray<T> array = device_array<T>(values.size());
  copy(array.get(), values.data(), values.size());
  return array;
}

// ---- One schedule on the device, in memory laid out as the library lays it out

class DeviceSchedule {
 public:
  explicit DeviceSchedule(const ScheduleCase& c)
      : layout_(c.geometry),
        context_(device_array<char>(static_cast<std::size_t>(layout_.context.bytes))),
        workspace_(device_array<char>(static_cast<std::size_t>(layout_.workspace.bytes))),
        barrier_(device_array<sm90::GridBarrierState>(1)),
        phase_ends_(device_array<std::uint64_t>(sm90::kSchedulePhaseEnds)),
        tokens_(on_device(c.tokens_per_rank)),
        copy_of_context_(static_cast<std::size_t>(layout_.context.bytes), '\xff') {
    std::vector<const std::int32_t*> pointers;
    for (const std::vector<std::int32_t>& of_rank : c.ids) {
      ids_.push_back(on_device(of_rank));
      pointers.push_back(ids_.back().get());
    }
    id_pointers_ = on_device(pointers);
    // Scratch holds rubbish, and rows that no token fills hold a mark that must survive.
    check(cudaMemset(workspace_.get(), 0xff, static_cast<std::size_t>(layout_.workspace.bytes)), "cudaMemset");
    const protocol::Schedule view = layout_.context.schedule(copy_of_context_.data());
    std::fill_n(view.row_source, layout_.context.row_source.count, BuiltSchedule::kUnwritten);
    std::fill_n(view.row_route, layout_.context.row_route.count,
                protocol::RouteRef{BuiltSchedule::kUnwritten, BuiltSchedule::kUnwritten});
    copy(context_.get(), copy_of_context_.data(), copy_of_context_.size());
    params_.task = {c.geometry, c.rank, tokens_.get(), layout_.context.schedule(context_.get()),
                    layout_.workspace.scratch(workspace_.get())};
    params_.ids = id_pointers_.get();
    params_.barrier = barrier_.get();
    params_.phase_end_ns = phase_ends_.get();
    params_.barrier_limit_ns = kBarrierLimitNs;
  }

  void launch(int blocks) { check(sm90::launch_schedule(params_, blocks, nullptr), "launch"); }

  protocol::Schedule result() {
    check(cudaDeviceSynchronize(), "the schedule kernel");
    sm90::GridBarrierState barrier{};
    copy(&barrier, barrier_.get(), 1);
    if (barrier.gave_up != 0) {
      throw std::runtime_error("barrier: " + std::to_string(barrier.seen) + " of " + std::to_string(barrier.wanted) +
                               " blocks came within the limit");
    }
    copy(copy_of_context_.data(), context_.get(), copy_of_context_.size());
    return layout_.context.schedule(copy_of_context_.data());
  }

  std::vector<std::uint64_t> phase_ends() const {
    std::vector<std::uint64_t> ends(sm90::kSchedulePhaseEnds);
    copy(ends.data(), phase_ends_.get(), ends.size());
    return ends;
  }

 private:
  protocol::Layout layout_;
  DeviceArray<char> context_, workspace_;
  DeviceArray<sm90::GridBarrierState> barrier_;
  DeviceArray<std::uint64_t> phase_ends_;
  DeviceArray<std::int32_t> tokens_;
  std::vector<DeviceArray<std::int32_t>> ids_;
  DeviceArray<const std::int32_t*> id_pointers_;
  std::vector<char> copy_of_context_;
  sm90::ScheduleKernelParams params_{};
};

// ---- Equality over random configurations

std::int64_t between(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

ScheduleCase random_case(std::mt19937& random) {
  ScheduleCase c;
  const int ranks = static_cast<int>(between(random, 1, 9));
  const std::int64_t max_tokens = between(random, 0, 700);
  LayerShape shape;
  shape.hidden = shape.intermediate = 8;
  shape.experts = between(random, 0, 3) == 0 ? between(random, 1, 600) : between(random, 1, 40);
  shape.topk = between(random, 1, std::min<std::int64_t>(shape.experts, between(random, 0, 5) == 0 ? 64 : 8));
  Tuning tuning;
  tuning.minibatch_rows = between(random, 1, 700);
  if (between(random, 0, 1) == 0) tuning.ring_tokens = between(random, 1, 600);
  if (between(random, 0, 1) == 0) tuning.ring_rows = between(random, 1, 3000);
  c.geometry = plan::make_geometry(shape, ranks, max_tokens, plan::resolve_tuning(shape, ranks, max_tokens, tuning), 0);
  c.rank = static_cast<int>(between(random, 0, ranks - 1));
  for (int rank = 0; rank < ranks; ++rank) {
    c.tokens_per_rank.push_back(
        static_cast<std::int32_t>(between(random, 0, 4) == 0 ? 0 : between(random, 0, max_tokens)));
  }
  const Routing routing = kRoutings[between(random, 0, std::size(kRoutings) - 1)];
  c.ids =
      draw_ids(routing, c.tokens_per_rank, c.geometry.experts, c.geometry.topk, static_cast<std::uint32_t>(random()));
  return c;
}

// The first difference, empty if none.
std::string compare(const ScheduleCase& c, int blocks) {
  BuiltSchedule host(c);
  host.build(c.ids, 1);
  DeviceSchedule device(c);
  device.launch(blocks);
  return first_difference(host.view(), device.result());
}

bool equals_the_host(int sms) {
  std::mt19937 random(20260801);
  int differences = 0;
  for (int i = 0; i < kRandomCases; ++i) {
    const ScheduleCase c = random_case(random);
    const int choices[] = {1, 2, 7, sms};
    const int blocks = choices[between(random, 0, 3)];
    const std::string difference = compare(c, blocks);
    if (difference.empty()) continue;
    ++differences;
    std::ostringstream text;
    text << c;
    std::printf("DIFFERENT  case %d, %d blocks: host against device, %s\n  %s\n", i, blocks, difference.c_str(),
                text.str().c_str());
  }
  std::printf("random configurations: %d of %d equal to the host\n", kRandomCases - differences, kRandomCases);
  return differences == 0;
}

// ---- Layout

__global__ void layout_kernel(protocol::Geometry geometry, protocol::Layout* layout) {
  *layout = protocol::Layout(geometry);
}

// All of it after the geometry is 64-bit numbers, so bytes can be compared.
bool same_layout(const protocol::Geometry& geometry) {
  const protocol::Layout host(geometry);
  DeviceArray<protocol::Layout> device = device_array<protocol::Layout>(1);
  layout_kernel<<<1, 1>>>(geometry, device.get());
  check(cudaDeviceSynchronize(), "the layout kernel");
  protocol::Layout copied(geometry);
  copy(&copied, device.get(), 1);
  return copied.geometry == host.geometry &&
         std::equal(reinterpret_cast<const char*>(&host.counters), reinterpret_cast<const char*>(&host + 1),
                    reinterpret_cast<const char*>(&copied.counters));
}

bool layouts_agree() {
  std::mt19937 random(7);
  int equal = 0;
  for (int i = 0; i < kRandomCases; ++i) {
    protocol::Geometry geometry = random_case(random).geometry;
    geometry.hidden = 8 * between(random, 1, 1000);
    geometry.intermediate = 8 * between(random, 1, 1000);
    geometry.shared_intermediate = 8 * between(random, 0, 1000);
    geometry.saved_rows = protocol::kTileRows * between(random, 0, 1000);
    equal += same_layout(geometry) ? 1 : 0;
  }
  std::printf("layouts: %d of %d equal to the host\n", equal, kRandomCases);
  return equal == kRandomCases;
}

// ---- Times

struct TimedShape {
  const char* name;
  int ranks;
  std::int32_t tokens;
  std::int32_t experts;
  std::int64_t intermediate;
};
constexpr TimedShape kShapes[] = {
    {"A", 2, 8192, 64, 2048}, {"B", 2, 8192, 32, 1536}, {"C", 2, 16384, 32, 768}, {"A, 8 ranks", 8, 8192, 256, 2048}};
struct NamedRouting {
  const char* name;
  Routing routing;
};
constexpr NamedRouting kTimedRoutings[] = {
    {"random", Routing::kUniform}, {"masked", Routing::kMasked}, {"one expert", Routing::kSingleExpert}};

ScheduleCase timed_case(const TimedShape& timed, Routing routing) {
  LayerShape shape;
  shape.hidden = 8;  // the schedule does not depend on it
  shape.intermediate = timed.intermediate;
  shape.experts = timed.experts;
  shape.topk = 8;
  Tuning tuning;
  tuning.minibatch_rows = 2048;
  ScheduleCase c;
  c.geometry = plan::make_geometry(shape, timed.ranks, timed.tokens,
                                   plan::resolve_tuning(shape, timed.ranks, timed.tokens, tuning), 0);
  c.geometry.intermediate = 8;
  c.rank = timed.ranks / 2;  // owner of the single expert
  c.tokens_per_rank.assign(static_cast<std::size_t>(timed.ranks), timed.tokens);
  c.ids = draw_ids(routing, c.tokens_per_rank, timed.experts, 8, 1);
  return c;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Microseconds: the whole launch, then each phase.
std::vector<double> time_launches(DeviceSchedule& device, int blocks) {
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<std::vector<double>> samples(1 + std::size(kPhases));
  for (int i = 0; i < kTimedLaunches; ++i) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    device.launch(blocks);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "the schedule kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    samples[0].push_back(1000.0 * ms);
    const std::vector<std::uint64_t> ends = device.phase_ends();
    for (std::size_t phase = 0; phase < std::size(kPhases); ++phase) {
      samples[1 + phase].push_back(1e-3 * static_cast<double>(ends[phase + 1] - ends[phase]));
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::vector<double> medians;
  for (const std::vector<double>& of_phase : samples) medians.push_back(median(of_phase));
  return medians;
}

double host_us(BuiltSchedule& host, const AllIds& ids) {
  const auto begin = std::chrono::steady_clock::now();
  host.build(ids, 1);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

bool time_shapes(int sms) {
  std::printf("\nmedians of %d launches, microseconds; launch: events around clear and kernel; host: one thread\n",
              kTimedLaunches);
  std::printf("%-11s %-11s %7s %8s %7s %9s %8s", "shape", "routing", "rows", "pulls", "blocks", "host", "launch");
  for (const char* phase : kPhases) std::printf(" %8s", phase);
  std::printf("  equal\n");
  bool equal = true;
  for (const TimedShape& shape : kShapes) {
    for (const NamedRouting& routing : kTimedRoutings) {
      const ScheduleCase c = timed_case(shape, routing.routing);
      BuiltSchedule host(c);
      const double on_host = host_us(host, c.ids);
      for (const int blocks : {sms, 8}) {
        DeviceSchedule device(c);
        const std::vector<double> us = time_launches(device, blocks);
        const std::string difference = first_difference(host.view(), device.result());
        const protocol::ScheduleTotals& totals = *host.view().totals;
        std::printf("%-11s %-11s %7lld %8d %7d %9.0f", shape.name, routing.name, static_cast<long long>(totals.rows),
                    totals.pulls, blocks, on_host);
        for (const double time : us) std::printf(" %8.1f", time);
        std::printf("  %s\n", difference.empty() ? "yes" : difference.c_str());
        equal = equal && difference.empty();
      }
    }
  }
  return equal;
}

// Why this machine cannot run the test, empty if it can.
std::string obstacle(cudaDeviceProp& properties) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) return std::string("no GPU (") + cudaGetErrorString(status) + ")";
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  if (properties.major == 9 && properties.minor == 0) return "";
  return "GPU 0 has compute capability " + std::to_string(properties.major) + "." + std::to_string(properties.minor) +
         "; this program is built for 9.0 alone";
}

int run() {
  cudaDeviceProp properties{};
  const std::string why_not = obstacle(properties);
  if (!why_not.empty()) {
    std::printf("NOT RUN: %s. NOTHING WAS TESTED.\n", why_not.c_str());
    return kNotRun;
  }
  const int sms = properties.multiProcessorCount;
  std::printf("%s, %d SMs\n", properties.name, sms);
  const bool layouts = layouts_agree();
  const bool schedules = equals_the_host(sms);
  const bool timed = time_shapes(sms);
  const bool passed = layouts && schedules && timed;
  std::printf("%s\n", passed ? "PASSED" : "FAILED");
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace moewave::test

int main() {
  try {
    return moewave::test::run();
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
