// Tests what Connect() tells ranks that do not come together.
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/meeting/job_store.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_in_threads.h"
#include "comm/testing/ranks_of_one_host.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::ConnectAll;
using ::fsdp::comm::testing::kLimit;
using ::fsdp::comm::testing::Options;
using ::fsdp::comm::testing::RanksOfOneHost;
using ::fsdp::comm::testing::RunInThreads;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(300);

TEST(ConnectTest, WorldSizesMustAgree) {
  std::vector<Environment> ranks = RanksOfOneHost(3);
  ranks[1].world_size = 4;
  EXPECT_THAT(ConnectAll(ranks, Options()),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            AllOf(HasSubstr("one of 3"), HasSubstr("one of 4"),
                                  HasSubstr("same world size")))));
}

TEST(ConnectTest, TwoProcessesCannotBeTheSameRank) {
  std::vector<Environment> ranks = RanksOfOneHost(3);
  ranks[2].rank = 1;
  EXPECT_THAT(ConnectAll(ranks, Options()),
              Each(StatusIs(absl::StatusCode::kAlreadyExists,
                            HasSubstr("two processes came as rank 1 of 3"))));
}

TEST(ConnectTest, AnAbsentRank0IsNamed) {
  const Environment rank1 = RanksOfOneHost(2)[1];
  EXPECT_THAT(
      Connect(rank1, Options(kShort)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("rank 1 of 2"), HasSubstr("nobody answers"),
                     HasSubstr("does rank 0 run there"))));
}

TEST(ConnectTest, ASilentRank0IsNamed) {
  const Environment rank1 = RanksOfOneHost(2)[1];
  // Connections wait in the backlog forever, as with a stopped process.
  ASSERT_OK_AND_ASSIGN(const Listener silent,
                       Listen("127.0.0.1", rank1.master_port));
  EXPECT_THAT(Connect(rank1, Options(kShort)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("does not answer")));
}

// Rank 0 waits for the goodbyes of those who have come, longer than the limit
// of the whole connection lets it.
TEST(ConnectTest, WaitingForGoodbyesChangesNothingInTheError) {
  const Environment rank0 = RanksOfOneHost(2)[0];
  std::thread visit([&] {
    FSDP_CHECK(WaitUntilReachable("127.0.0.1", rank0.master_port,
                                  {absl::Now() + kLimit})
                   .ok());
    const auto visitor =
        JobStore::Connect({"127.0.0.1", rank0.master_port, rank0.secret},
                          kLimit, {absl::Now() + kLimit});
    FSDP_CHECK(visitor.ok());
    (*visitor)->add("/fsdp/visitors", 1);
  });
  EXPECT_THAT(Connect(rank0, Options(absl::Seconds(1))),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("1 of 2 ranks met"),
                             HasSubstr("missing: rank 1"))));
  visit.join();
}

TEST(ConnectTest, ARankThatDoesNotKnowTheSecret) {
  std::vector<Environment> ranks = RanksOfOneHost(3);
  for (Environment& rank : ranks) rank.secret = "of the job";
  ranks[1].secret = "of another job";
  std::vector<absl::Status> results;
  RunInThreads(
      3,
      [&](int i) {
        return Connect(ranks[i], Options(absl::Seconds(1))).status();
      },
      &results)
      .IgnoreError();
  EXPECT_THAT(results[1], StatusIs(absl::StatusCode::kPermissionDenied,
                                   AllOf(HasSubstr("rank 1 of 3"),
                                         HasSubstr("FSDP_JOB_SECRET"))));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(results[rank],
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         AllOf(HasSubstr("missing: rank 1"),
                               HasSubstr("do not know the job's secret: 1 "))));
  }
}

TEST(ConnectTest, ARankThatFailsTellsTheOthers) {
  const std::vector<Environment> ranks = RanksOfOneHost(3);
  std::vector<absl::Status> results;
  RunInThreads(
      3,
      [&](int i) {
        ConnectOptions options = Options(absl::Hours(1));
        options.backend = Backend::kGloo;
        if (i == 1) options.interface = "no_such_interface";
        return Connect(ranks[i], options).status();
      },
      &results)
      .IgnoreError();
  EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("no_such_interface"))));
  for (int other : {0, 2}) {
    EXPECT_THAT(std::string(results[other].message()),
                HasSubstr(absl::StrCat("connecting rank ", other, " of 3")));
    EXPECT_THAT(std::string(results[other].message()), HasSubstr("rank 1: "));
  }
}

TEST(ConnectTest, AWishToStopEndsIt) {
  const Environment rank1 = RanksOfOneHost(2)[1];
  ASSERT_OK_AND_ASSIGN(const Listener silent,
                       Listen("127.0.0.1", rank1.master_port));
  ConnectOptions options = Options(absl::Hours(1));
  options.stop_requested = [] { return true; };
  EXPECT_THAT(Connect(rank1, options), StatusIs(absl::StatusCode::kCancelled,
                                                HasSubstr("asked to stop")));
}

TEST(ConnectTest, RefusesWhatCannotWork) {
  ConnectOptions local = Options();
  local.backend = Backend::kLocal;
  EXPECT_THAT(Connect(RanksOfOneHost(2)[0], local),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("threads of one process"),
                             HasSubstr("Slurm started 2 processes"))));
  Environment environment = RanksOfOneHost(2)[0];
  environment.rank = 2;
  EXPECT_THAT(Connect(environment), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("rank 2 of 2")));
  environment = RanksOfOneHost(2)[0];
  environment.master_addr.clear();
  EXPECT_THAT(Connect(environment), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("an address")));
  ConnectOptions interface = Options();
  interface.backend = Backend::kGloo;
  interface.interface = "no_such_interface";
  EXPECT_THAT(ConnectAll(RanksOfOneHost(2), interface)[0].message(),
              HasSubstr("no_such_interface"));
}

}  // namespace
}  // namespace fsdp::comm
