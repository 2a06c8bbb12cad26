#include "comm/gloo/gloo_communicator.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

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
  EXPECT_THAT(
      CreateGlooCommunicator(c10::make_intrusive<c10d::HashStore>(), 1, 3,
                             OptionsFor(absl::Milliseconds(50))),
      StatusIs(Code::kDeadlineExceeded,
               AllOf(HasSubstr("create the gloo group on rank 1 of 3"),
                     HasSubstr("rank 0, rank 2 did not come within 50ms"))));
}

TEST(GlooCommunicatorTest, RefusesWrongOptions) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank : {-1, 2}) {
    EXPECT_THAT(
        CreateGlooCommunicator(store, rank, 2),
        StatusIs(Code::kInvalidArgument, HasSubstr("rank < world size")));
  }
  GlooOptions both = OptionsFor(absl::Seconds(1));
  both.interface = "lo";
  EXPECT_THAT(CreateGlooCommunicator(store, 0, 1, both),
              StatusIs(Code::kInvalidArgument, HasSubstr("both")));
  GlooOptions nowhere;
  nowhere.interface = "no_such_interface";
  EXPECT_THAT(CreateGlooCommunicator(store, 0, 1, nowhere),
              StatusIs(Code::kInvalidArgument,
                       HasSubstr("no network interface named no_such")));
}

// Returns how rank 0 of two ends, by Gloo, if rank 1 connects by `factory`.
absl::Status ConnectTo(const TransportFactory& factory, absl::Duration limit,
                       absl::Status* other) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  MessageOptions options;
  options.timeout = limit;
  options.place = "at 10.0.0.7";
  std::thread rank1([&] {
    *other = CreateMessageCommunicator(store, 1, 2, "gloo", factory, options)
                 .status();
  });
  GlooOptions gloo = OptionsFor(limit);
  gloo.hostname = "127.0.0.1";
  absl::Status own = CreateGlooCommunicator(store, 0, 2, gloo).status();
  rank1.join();
  return own;
}

TEST(GlooCommunicatorTest, ARankThatCannotConnectTellsTheOthers) {
  const auto refused =
      [](const c10::intrusive_ptr<c10d::Store>&, int, const RankNames&,
         absl::Duration) -> absl::StatusOr<std::unique_ptr<MessageTransport>> {
    return absl::UnavailableError("connection refused");
  };
  absl::Status other;
  EXPECT_THAT(ConnectTo(refused, absl::Hours(1), &other),
              StatusIs(Code::kUnavailable,
                       AllOf(HasSubstr("gloo group on rank 0 of 2: rank 1: "),
                             HasSubstr("at 10.0.0.7: connection refused"))));
  EXPECT_THAT(other, StatusIs(Code::kUnavailable,
                              HasSubstr("on rank 1 of 2: at 10.0.0.7: conn")));
}

TEST(GlooCommunicatorTest, NamesTheInterfaceThatNobodyReached) {
  const auto never = std::make_shared<absl::Notification>();
  const auto hang =
      [never](
          const c10::intrusive_ptr<c10d::Store>&, int, const RankNames&,
          absl::Duration) -> absl::StatusOr<std::unique_ptr<MessageTransport>> {
    // The call holds a copy: its function may be gone before it returns.
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
    const auto held = never;
    held->WaitForNotification();
    return absl::UnavailableError("over");
  };
  absl::Status other;
  const absl::Status own = ConnectTo(hang, absl::Seconds(2), &other);
  for (const absl::Status& status : {own, other}) {
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("at 127.0.0.1 (interface lo), which the others "
                                "must reach"),
                      HasSubstr("GLOO_SOCKET_IFNAME")));
  }
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
