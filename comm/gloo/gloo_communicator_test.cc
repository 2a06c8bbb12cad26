#include "comm/gloo/gloo_communicator.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

GlooOptions OptionsFor(absl::Duration timeout) {
  GlooOptions options;
  options.timeout = timeout;
  options.hostname = "127.0.0.1";
  return options;
}

INSTANTIATE_TEST_SUITE_P(Gloo, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "gloo",
                             [](int world_size, absl::Duration timeout) {
                               return CreateGlooGroup(world_size, timeout);
                             }}),
                         BackendName);

TEST(GlooCommunicatorTest, NamesTheRanksThatDoNotCome) {
  EXPECT_THAT(CreateGlooCommunicator(c10::make_intrusive<c10d::HashStore>(), 1,
                                     3, OptionsFor(absl::Milliseconds(50))),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("create the gloo group on rank 1 of 3"),
                             HasSubstr("rank 0, rank 2 have not come"))));
}

TEST(GlooCommunicatorTest, RefusesWrongOptions) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank : {-1, 2}) {
    EXPECT_DEATH((void)CreateGlooCommunicator(store, rank, 2), "world_size");
  }
  GlooOptions both = OptionsFor(absl::Seconds(1));
  both.interface = "lo";
  EXPECT_DEATH((void)CreateGlooCommunicator(store, 0, 1, both), "hostname");
  GlooOptions nowhere;
  nowhere.interface = "no_such_interface";
  EXPECT_THAT(CreateGlooCommunicator(store, 0, 1, nowhere),
              StatusIs(Code::kInvalidArgument,
                       HasSubstr("no network interface named no_such")));
}

TEST(GlooCommunicatorTest, NamesTheInterfaceThatNobodyReached) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->c10d::Store::set("group1/sizes/1", "2");  // rank 1 does no more
  const absl::Status status =
      CreateGlooCommunicator(store, 0, 2, OptionsFor(absl::Seconds(2)))
          .status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("gloo group on rank 0 of 2: at 127.0.0.1 "
                      "(interface lo), which the others must reach"),
            HasSubstr("GLOO_SOCKET_IFNAME"), HasSubstr("it cannot connect")));
}

TEST(GlooCommunicatorTest, RefusesRanksThatDisagreeOnTheSize) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  absl::Status first;
  std::thread other([&] {
    first = CreateGlooCommunicator(store, 0, 1, OptionsFor(absl::Seconds(20)))
                .status();
  });
  EXPECT_THAT(
      CreateGlooCommunicator(store, 1, 2, OptionsFor(absl::Seconds(20))),
      StatusIs(Code::kInvalidArgument, HasSubstr("2 here, rank 0 says 1")));
  other.join();
  EXPECT_OK(first);
}

TEST(GlooCommunicatorTest, ASizeThatDiffersIsToldAlsoWhereSomebodyIsMissing) {
  for (const char* there : {"0", "1"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    store->c10d::Store::set(absl::StrCat("group1/sizes/", there), "2");
    EXPECT_THAT(
        CreateGlooCommunicator(store, 2, 3, OptionsFor(absl::Milliseconds(50))),
        StatusIs(Code::kInvalidArgument,
                 HasSubstr(absl::StrCat("3 here, rank ", there, " says 2"))));
  }
}

TEST(GlooCommunicatorTest, WithoutThreadsThereIsNone) {
  const ::fsdp::testing::NoThreads none;
  EXPECT_THAT(
      CreateGlooCommunicator(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                             OptionsFor(absl::Seconds(20))),
      StatusIs(Code::kResourceExhausted, HasSubstr("cannot start a thread")));
}

// Returns the threads of this process.
std::set<std::string> Threads() {
  std::set<std::string> threads;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(entry.path());
  }
  return threads;
}

// Returns the signals that a thread blocks, as /proc has them.
uint64_t BlockedSignals(const std::string& thread) {
  std::ifstream status(thread + "/status");
  for (std::string line; std::getline(status, line);) {
    absl::string_view hex = line;
    if (!absl::ConsumePrefix(&hex, "SigBlk:")) continue;
    return std::stoull(std::string(hex), nullptr, 16);
  }
  return 0;
}

// Gloo raises SIGPIPE when a peer is gone, one time in a few hundred, and that
// would end the program; see Create() in gloo_communicator.cc.
TEST(GlooCommunicatorTest, NoThreadThatWritesTakesSigpipe) {
  const std::set<std::string> before = Threads();
  ASSERT_OK_AND_ASSIGN(const Group group, CreateGlooGroup(2));
  int num_new = 0;
  for (const std::string& thread : Threads()) {
    if (before.count(thread) > 0) continue;
    ++num_new;
    EXPECT_NE(BlockedSignals(thread) & (uint64_t{1} << (SIGPIPE - 1)), 0u)
        << thread;
  }
  EXPECT_GE(num_new, 4);  // per rank: Gloo's and the group's own
}

}  // namespace
}  // namespace fsdp::comm::testing
