// Promises of the meeting of processes: everybody gets everybody's bytes, one failure is everybody's failure, nothing
// waits for ever, and what launchers say is understood or refused by name.
#include "moewave/process_group.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <map>

#include "moewave/error.h"
#include "support/free_port.h"
#include "support/refusal.h"
#include "transport/socket.h"
#include "transport/together.h"

namespace moewave::test {
namespace {

ProcessGroupOptions member(int process, int processes, int port, std::int64_t timeout_ms = 20'000) {
  return {.process = process, .processes = processes, .address = "localhost", .port = port, .timeout_ms = timeout_ms};
}

// Runs `body` as every process of a group, each in a thread. What each threw, by process.
std::vector<std::string> as_processes(const std::vector<ProcessGroupOptions>& members,
                                      const std::function<void(ProcessGroup&)>& body) {
  std::vector<std::future<std::string>> running;
  for (const ProcessGroupOptions& options : members) {
    running.push_back(std::async(std::launch::async, [&options, &body]() -> std::string {
      try {
        body(*join_process_group(options));
      } catch (const InputError& error) {
        return std::string("InputError: ") + error.what();
      } catch (const Error& error) {
        return std::string("Error: ") + error.what();
      }
      return "";
    }));
  }
  std::vector<std::string> failures;
  for (auto& one : running) failures.push_back(one.get());
  return failures;
}

std::vector<ProcessGroupOptions> members(int processes, std::int64_t timeout_ms = 20'000) {
  const int port = free_port();
  std::vector<ProcessGroupOptions> result;
  for (int p = 0; p < processes; ++p) result.push_back(member(p, processes, port, timeout_ms));
  return result;
}

TEST(ProcessGroup, EveryProcessGetsTheBytesOfAllInOrder) {
  for (const int processes : {1, 2, 5}) {
    const auto failures = as_processes(members(processes), [&](ProcessGroup& group) {
      for (int round = 0; round < 20; ++round) {
        const auto mine = std::string(static_cast<std::size_t>(group.process() * round), 'x') + std::string("\0y", 2);
        const auto all = group.all_gather(mine);
        ASSERT_EQ(all.size(), static_cast<std::size_t>(processes));
        for (int p = 0; p < processes; ++p) {
          EXPECT_EQ(all[static_cast<std::size_t>(p)],
                    std::string(static_cast<std::size_t>(p * round), 'x') + std::string("\0y", 2));
        }
        group.barrier();
      }
    });
    for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  }
}

TEST(ProcessGroup, RealProcessesMeet) {
  const auto all = members(3);
  std::vector<pid_t> children;
  for (int p = 1; p < 3; ++p) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        const auto group = join_process_group(all[static_cast<std::size_t>(p)]);
        ::_exit(group->all_gather(std::to_string(p))[0] == "0" ? 0 : 1);
      } catch (const std::exception&) {
        ::_exit(2);
      }
    }
    children.push_back(child);
  }
  const auto group = join_process_group(all[0]);
  EXPECT_EQ(group->all_gather("0"), (std::vector<std::string>{"0", "1", "2"}));
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(ProcessGroup, AProcessThatNeverComesIsNamedWithinTheLimit) {
  auto all = members(3, 300);
  all.pop_back();
  const auto failures = as_processes(all, [](ProcessGroup&) {});
  EXPECT_NE(failures[0].find("300 ms: 2"), std::string::npos) << failures[0];
  EXPECT_NE(failures[1], "");
}

TEST(ProcessGroup, AProcessWithoutAListenerGivesUpWithinTheLimit) {
  const auto failures = as_processes({member(1, 2, free_port(), 200)}, [](ProcessGroup&) {});
  EXPECT_NE(failures[0].find("cannot reach process 0"), std::string::npos) << failures[0];
}

TEST(ProcessGroup, DisagreementOnTheNumberOfProcessesIsRefusedOnAll) {
  auto all = members(3);
  all[2].processes = 4;
  const auto failures = as_processes(all, [](ProcessGroup&) {});
  for (const std::string& failure : {failures[0], failures[2]}) {
    EXPECT_NE(failure.find("InputError: process 2 says there are 4 processes, process 0 says 3"), std::string::npos)
        << failure;
  }
  EXPECT_NE(failures[1], "");
}

TEST(ProcessGroup, TwoProcessesOfOneNumberAreRefused) {
  auto all = members(3);
  all[2].process = 1;
  const auto failures = as_processes(all, [](ProcessGroup&) {});
  EXPECT_NE(failures[0].find("two processes say they are number 1"), std::string::npos) << failures[0];
}

TEST(ProcessGroup, AStrangerOnThePortDoesNotDisturb) {
  const auto all = members(2);
  std::future<std::string> stranger = std::async(std::launch::async, [&]() -> std::string {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    Socket::connect_to("localhost", all[0].port, deadline).send("GET / HTTP/1.0\r\n\r\n", deadline);
    return "";
  });
  std::future<std::vector<std::string>> zero =
      std::async(std::launch::async, [&] { return as_processes({all[0]}, [](ProcessGroup& g) { g.barrier(); }); });
  stranger.get();
  EXPECT_EQ(as_processes({all[1]}, [](ProcessGroup& g) { g.barrier(); })[0], "");
  EXPECT_EQ(zero.get()[0], "");
}

TEST(ProcessGroup, AFailureOfOneProcessIsThrownOnAllWithItsType) {
  const auto failures = as_processes(members(3), [](ProcessGroup& group) {
    together(group, [] {});
    together(group, [&] {
      if (group.process() == 1) throw InputError("hidden is 12");
    });
  });
  EXPECT_EQ(failures[0], "InputError: process 1: hidden is 12");
  EXPECT_EQ(failures[1], "InputError: hidden is 12");
  EXPECT_EQ(failures[2], "InputError: process 1: hidden is 12");
}

TEST(ProcessGroup, AProcessThatLeavesEndsTheExchangeOfAll) {
  const auto failures = as_processes(members(3), [](ProcessGroup& group) {
    if (group.process() == 2) return;
    EXPECT_THROW(group.barrier(), Error);
    EXPECT_THROW(group.barrier(), Error);  // and stays closed
  });
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

TEST(ProcessGroup, OptionsThatCannotBeAreRefused) {
  EXPECT_NE(refusal([] { join_process_group(member(2, 2, 1234)); }).find("process is 2"), std::string::npos);
  EXPECT_NE(refusal([] { join_process_group(member(0, 0, 1234)); }).find("processes is 0"), std::string::npos);
  EXPECT_NE(refusal([] { join_process_group(member(0, 1, 0)); }).find("port is 0"), std::string::npos);
  EXPECT_NE(refusal([] { join_process_group(member(0, 1, 1, 0)); }).find("timeout_ms is 0"), std::string::npos);
}

// ---- What launchers say

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) ::unsetenv(name);
  }
  void TearDown() override { SetUp(); }

  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "MPI_LOCALRANKID",
                                           "TORCHELASTIC_USE_AGENT_STORE"};
  static void set(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
};

TEST_F(Environment, WithoutALauncherThereIsOneProcess) {
  const ProcessGroupOptions options = process_group_from_environment();
  EXPECT_EQ(options.process, 0);
  EXPECT_EQ(options.processes, 1);
  EXPECT_EQ(local_process_from_environment(), 0);
}

TEST_F(Environment, TorchrunIsUnderstood) {
  set({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "4000"}});
  const ProcessGroupOptions options = process_group_from_environment();
  EXPECT_EQ(options.process, 5);
  EXPECT_EQ(options.processes, 8);
  EXPECT_EQ(options.address, "node7");
  EXPECT_EQ(options.port, 4000);
  EXPECT_EQ(local_process_from_environment(), 1);
  set({{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(process_group_from_environment().port, 4001);
}

TEST_F(Environment, MpirunIsUnderstood) {
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "3"}});
  EXPECT_EQ(process_group_from_environment().process, 1);
  EXPECT_EQ(local_process_from_environment(), 3);
  set({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_EQ(process_group_from_environment().process, 2);
  EXPECT_EQ(process_group_from_environment().processes, 4);
  EXPECT_EQ(local_process_from_environment(), 0);
}

TEST_F(Environment, HalfAStatementAndNonsenseAreRefusedByName) {
  set({{"RANK", "1"}});
  EXPECT_NE(refusal([] { process_group_from_environment(); }).find("WORLD_SIZE is not"), std::string::npos);
  set({{"WORLD_SIZE", "1"}});
  EXPECT_NE(refusal([] { process_group_from_environment(); }).find("RANK is '1'"), std::string::npos);
  set({{"WORLD_SIZE", "two"}});
  EXPECT_NE(refusal([] { process_group_from_environment(); }).find("WORLD_SIZE is 'two'"), std::string::npos);
  set({{"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}});
  EXPECT_NE(refusal([] { process_group_from_environment(); }).find("MASTER_PORT is '99999'"), std::string::npos);
}

}  // namespace
}  // namespace moewave::test
