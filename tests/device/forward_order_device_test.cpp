// Promises of the forward layer on GPUs about calls in a row: no barrier between them, graphs, failures and what comes
// after them, processes.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "device/cuda_run.h"
#include "kernels/sm90/random_fill.h"
#include "support/free_port.h"
#include "support/refusal.h"

extern char** environ;

namespace moewave::test {
namespace {

class InOrder : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(CudaForward, InOrder, ::testing::Values(1, 2, 3, 4, 8), ::testing::PrintToStringParamName());

// ---- Calls back to back

TEST_P(InOrder, TwoHundredJitteredCallsWithoutAWaitGiveTheRightResults) {
  constexpr int kCalls = 200;
  constexpr int kBatches = 5;
  const LayerShape shape = make_shape(136, 72, 12, 3, 40);
  LayerCase c = random_case(shape, Tokens(static_cast<std::size_t>(ranks()), 100), 40);
  CudaSetup setup;
  setup.options.jitter_ns = 50'000;
  setup.tuning.ring_tokens = 64;
  setup.tuning.minibatch_rows = 256;
  CudaRun run(c, setup);
  std::vector<std::vector<Bf16>> wanted;
  std::vector<HostBatch> batches;
  for (int i = 0; i < kBatches; ++i) {
    Tokens tokens;
    for (int rank = 0; rank < ranks(); ++rank) tokens.push_back((i * 37 + rank * 53) % 101);
    c.batch = random_case(shape, tokens, 41 + static_cast<std::uint64_t>(i)).batch;
    batches.push_back(c.batch);
    wanted.push_back(run.run(c.batch));
    expect_matches(c, wanted.back());
  }
  std::vector<std::vector<RankTensors>> calls;
  for (int call = 0; call < kCalls; ++call)
    calls.push_back(run.upload(batches[static_cast<std::size_t>(call % kBatches)]));
  for (const auto& call : calls) run.enqueue(call);
  run.layer().check();
  for (std::size_t call = 0; call < calls.size(); ++call) {
    expect_same_bits("output of call " + std::to_string(call), CudaRun::output(calls[call]), wanted[call % kBatches]);
  }
}

TEST_P(InOrder, EpochsMayWrapAround) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), even_split(100, ranks()), 45);
  CudaSetup setup;
  setup.options.first_epoch = 0xfffffffdu;
  CudaRun run(c, setup);
  const std::vector<Bf16> first = run.run(c.batch);
  expect_matches(c, first);
  for (int call = 0; call < 6; ++call) expect_same_bits("output", run.run(c.batch), first);
}

// ---- Graphs

TEST_P(InOrder, ACapturedCallIsReplayedWithChangedInputs) {
  LayerCase c = random_case(make_shape(264, 136, 10, 3), even_split(200, ranks()), 46);
  CudaRun run(c);
  const std::vector<RankTensors> tensors = run.upload(c.batch);
  std::vector<cudaGraphExec_t> graphs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check_cuda(cudaSetDevice(run.local()[i].device), "cudaSetDevice");
    const cudaStream_t stream = run.layer().stream(i);
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    run.enqueue_rank(i, tensors[i]);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  for (std::uint64_t seed = 47; seed < 51; ++seed) {
    c.batch = random_case(c.shape, c.batch.tokens_per_rank, seed).batch;
    const std::vector<RankTensors> fresh = run.upload(c.batch);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].x.set(fresh[i].x.values());
      tensors[i].ids.set(fresh[i].ids.values());
      tensors[i].weights.set(fresh[i].weights.values());
    }
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      check_cuda(cudaSetDevice(run.local()[i].device), "cudaSetDevice");
      check_cuda(cudaGraphLaunch(graphs[i], run.layer().stream(i)), "cudaGraphLaunch");
    }
    // The layer does not know of replays: waiting for them is the caller's part.
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      check_cuda(cudaStreamSynchronize(run.layer().stream(i)), "cudaStreamSynchronize");
    }
    run.layer().check();
    expect_matches(c, CudaRun::output(tensors));
  }
  for (const cudaGraphExec_t graph : graphs) check_cuda(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
}

// ---- Failures

TEST(CudaForwardFailure, ARankThatNeverComesIsNamedAndTheLayerRecovers) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), even_split(100, 3), 52);
  CudaSetup setup;
  setup.options.entry_timeout_ms = 200;
  CudaRun run(c, setup);
  const std::vector<Bf16> wanted = run.run(c.batch);
  for (int round = 0; round < 2; ++round) {
    const std::vector<RankTensors> tensors = run.upload(c.batch);
    // Calls that are queued behind the one that stops end too.
    for (int call = 0; call < 3; ++call) {
      run.enqueue_rank(0, tensors[0]);
      run.enqueue_rank(2, tensors[2]);
    }
    try {
      run.layer().check();
      FAIL() << "the missing rank went unnoticed";
    } catch (const TimeoutError& error) {
      EXPECT_NE(error.record().rank, 1);
      EXPECT_NE(std::string(error.what()).find("ids of rank[1]"), std::string::npos) << error.what();
    }
    EXPECT_THROW(run.enqueue_rank(0, tensors[0]), Error);
    run.layer().recover();
    for (int call = 0; call < 2; ++call) expect_same_bits("output after recovery", run.run(c.batch), wanted);
  }
}

TEST_P(InOrder, ARankWithTooManyTokensIsRefusedOnAllAndTheNextCallIsRight) {
  const int last = ranks() - 1;
  LayerCase c = random_case(make_shape(136, 72, 12, 3), Tokens(static_cast<std::size_t>(ranks()), 16), 53);
  CudaRun run(c);
  const std::vector<Bf16> wanted = run.run(c.batch);
  Tokens tokens(static_cast<std::size_t>(ranks()), 5);
  tokens.back() = 17;
  const LayerCase large = random_case(c.shape, tokens, 54);
  const std::string message = refusal([&] { run.run(large.batch); });
  EXPECT_NE(message.find("rank " + std::to_string(last) + " has 17 tokens; this layer takes at most 16 a rank"),
            std::string::npos)
      << message;
  for (int call = 0; call < 3; ++call) expect_same_bits("output after the refusal", run.run(c.batch), wanted);
}

TEST_P(InOrder, AnIdOutOfRangeIsNamedOnceAndTheNextCallIsRight) {
  const int last = ranks() - 1;
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), Tokens(static_cast<std::size_t>(ranks()), 16), 55);
  for (const std::int32_t id : {-2, 12, 1'000'000'000, -1'000'000'000}) {
    CudaRun run(c);
    const std::vector<Bf16> wanted = run.run(c.batch);
    HostBatch bad = c.batch;
    bad.topk_ids[static_cast<std::size_t>((last * 16 + 4) * 3 + 2)] = id;
    bad.topk_ids[static_cast<std::size_t>((last * 16 + 9) * 3)] = id;
    const std::string message = refusal([&] { run.run(bad); });
    EXPECT_NE(message.find("rank " + std::to_string(last) + ", token 4, slot 2"), std::string::npos) << message;
    EXPECT_NE(message.find("-1 to 11"), std::string::npos) << message;
    for (int call = 0; call < 3; ++call) expect_same_bits("output after the bad id", run.run(c.batch), wanted);
  }
}

TEST(CudaForwardFailure, IdsAreTestedBeforeTheyAreNarrowed) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), even_split(100, 2), 56);
  CudaSetup setup;
  setup.id_type = IdType::kInt64;
  for (const std::int64_t id : {std::int64_t{1} << 32, (std::int64_t{1} << 33) + 3, -(std::int64_t{1} << 32) - 1}) {
    CudaRun run(c, setup);
    std::vector<std::int64_t> ids(c.batch.topk_ids.begin(), c.batch.topk_ids.end());
    ids[7] = id;
    const std::vector<RankTensors> tensors = run.upload(c.batch, &ids);
    run.enqueue(tensors);
    EXPECT_NE(refusal([&] { run.layer().check(); }).find("rank 0, token 2, slot 1"), std::string::npos);
    expect_matches(c, run.run(c.batch));
  }
}

TEST(CudaForwardFailure, WhatCannotBeIsRefusedBeforeALaunch) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), even_split(100, 2), 57);
  CudaRun run(c);
  std::vector<RankTensors> tensors = run.upload(c.batch);
  tensors[0].inputs.hidden_states += 1;
  EXPECT_NE(refusal([&] { run.enqueue_rank(0, tensors[0]); }).find("hidden_states is at address"), std::string::npos);
  EXPECT_NE(refusal([&] { run.layer().map_weights(0, {}); }).find("gate is missing"), std::string::npos);
  EXPECT_NE(refusal([&] { run.layer().map_weights(5, {}); }).find("index 5"), std::string::npos);
  const auto one = in_process(spread(1));
  EXPECT_NE(refusal([&] { CudaLayer(c.shape, one, 10, {.sms = 100'000}); }).find("sms is 100000"), std::string::npos);
  EXPECT_NE(refusal([&] { CudaLayer(make_shape(12, 8, 4, 2), one, 10); }).find("hidden is 12"), std::string::npos);
  EXPECT_NE(refusal([&] { in_process(std::vector<int>{0, 99}); }).find("device 99"), std::string::npos);
  EXPECT_NE(refusal([&] { in_process(std::vector<int>(33, 0)); }).find("33 ranks"), std::string::npos);
}

TEST(CudaForwardFailure, TheBytesThatAreTakenAreThoseThatWereForetold) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3, 16), even_split(100, 2), 58);
  const auto communicator = in_process(spread(2));
  const CudaLayerBytes foretold = CudaLayer::required_bytes(c.shape, *communicator, 64);
  const CudaLayer layer(c.shape, communicator, 64);
  EXPECT_EQ(layer.bytes().sum(), foretold.sum());
  EXPECT_EQ(layer.bytes().shared, CudaLayer::shared_bytes(c.shape, 2, 64));
}

// ---- Memory and processes

TEST_P(InOrder, MemoryThatTheCallerSharesServesAsWell) {
  const LayerCase c = random_case(make_shape(136, 72, 12, 3), even_split(100, ranks()), 59);
  const std::vector<int> devices = spread(ranks());
  const auto with_access = in_process(devices);
  const std::int64_t bytes = CudaLayer::shared_bytes(c.shape, ranks(), c.max_tokens());
  std::vector<DeviceValues<char>> memory;
  std::vector<void*> bases;
  for (const int device : devices) {
    bases.push_back(memory.emplace_back(device, static_cast<std::size_t>(bytes)).get());
  }
  std::vector<AdoptedRank> adopted;
  for (const int device : devices) adopted.push_back({device, bases});
  CudaRun run(c, {}, adopt_memory(adopted, bytes, nullptr));
  expect_same_bits("output", run.run(c.batch), CudaRun(c).run(c.batch));
  EXPECT_NE(refusal([&] {
              CudaLayer(c.shape, adopt_memory(adopted, bytes - 1, nullptr), c.max_tokens());
            }).find("adopted memory has"),
            std::string::npos);
}

constexpr int kProcesses = 2;

LayerCase case_of_processes() { return random_case(make_shape(264, 136, 10, 3), {100, 0, 77}, 60); }

// One process of the test below, which starts it; process 0 has two ranks.
TEST(CudaForwardProcess, DISABLED_OneOfSeveral) {
  const LayerCase c = case_of_processes();
  const auto group = join_process_group(process_group_from_environment());
  const std::vector<int> devices(group->process() == 0 ? 2 : 1, group->process() % gpus());
  CudaRun run(c, {}, across_processes(group, devices));
  const ReferenceResult reference = run_reference(c.shape, c.weights, c.batch, false);
  for (int call = 0; call < 3; ++call) {
    const std::vector<Bf16> output = run.run(c.batch);  // of this process's ranks
    const std::size_t first = group->process() == 0 ? 0 : reference.output.size() - output.size();
    const auto begin = reference.output.begin() + static_cast<std::ptrdiff_t>(first);
    expect_close("output", widen(output), {begin, begin + static_cast<std::ptrdiff_t>(output.size())}, c.shape.hidden,
                 5e-3);
  }
  if (::testing::Test::HasFailure()) ::_exit(1);
}

TEST(CudaForward, RanksOfSeveralProcessesWorkTogether) {
  std::vector<pid_t> children;
  ::setenv("WORLD_SIZE", std::to_string(kProcesses).c_str(), 1);
  ::setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  for (int process = 0; process < kProcesses; ++process) {
    ::setenv("RANK", std::to_string(process).c_str(), 1);
    std::string arguments[] = {"forward_order_device_test", "--gtest_also_run_disabled_tests",
                               "--gtest_filter=CudaForwardProcess.DISABLED_OneOfSeveral"};
    char* argv[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
    ASSERT_EQ(::posix_spawn(&children.emplace_back(), "/proc/self/exe", nullptr, nullptr, argv, environ), 0);
  }
  for (const char* name : {"WORLD_SIZE", "MASTER_PORT", "RANK"}) ::unsetenv(name);
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

// ---- Random tensors

TEST(CudaRandomFill, TheBitsAreThoseOfTheHost) {
  const LayerShape shape = make_shape(264, 136, 3, 1);
  const HostWeights host = random_weights(shape, 61);
  const std::size_t half = host.gate_up.size() / 2;
  DeviceValues<Bf16> device(0, half);
  check_cuda(sm90::launch_random_fill(device.get(), static_cast<std::int64_t>(half), 61, math::RandomStream::kGateUp,
                                      static_cast<std::int64_t>(half), 1.0 / 264, nullptr),
             "launch");
  check_cuda(cudaDeviceSynchronize(), "random fill");
  const std::vector<Bf16> wanted(host.gate_up.begin() + static_cast<std::ptrdiff_t>(half), host.gate_up.end());
  expect_same_bits("gate_up", device.values(), wanted);
}

}  // namespace
}  // namespace moewave::test
