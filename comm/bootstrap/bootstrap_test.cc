// Ranks are threads here; run_ranks_test.cc has processes.
#include "comm/bootstrap/bootstrap.h"

#include <cstdint>
#include <map>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/group/connect_together.h"
#include "comm/meeting/job_store.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/ranks_of_one_host.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::ConnectAll;
using ::fsdp::comm::testing::kLimit;
using ::fsdp::comm::testing::Options;
using ::fsdp::comm::testing::RanksOfOneHost;
using ::fsdp::comm::testing::RunInThreads;
using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST(ConnectTest, OneRankNeedsNoNetworkButMayUseGloo) {
  ConnectOptions options = Options();
  for (const char* name : {"local", "gloo"}) {
    ASSERT_OK_AND_ASSIGN(const auto communicator,
                         Connect(Environment(), options));
    EXPECT_THAT(communicator->ToString(), HasSubstr(name));
    EXPECT_OK(SumRanks(*communicator));
    options.backend = Backend::kGloo;
  }
}

// Ranks find each other in the place that the device's backend is given.
TEST(ConnectTest, ADevicesBackendIsPairedWithTheHosts) {
  for (const int world_size : {1, 3}) {
    const std::vector<Environment> ranks = world_size == 1
                                               ? std::vector<Environment>(1)
                                               : RanksOfOneHost(world_size);
    const std::vector<absl::Status> results =
        RunInThreads(world_size, [&](int i) -> absl::Status {
          ConnectOptions options = Options();
          options.device = [&](const DeviceMeeting& meeting)
              -> absl::StatusOr<std::unique_ptr<Communicator>> {
            const int rank = meeting.host.rank();
            FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                                  ExchangeByStore(meeting.store, "names", rank,
                                                  RankNames(world_size),
                                                  absl::StrCat("rank ", rank),
                                                  absl::Now() + kLimit));
            FSDP_RETURN_IF_ERROR(CheckThat(
                names.back(), absl::StrCat("rank ", world_size - 1), "name"));
            LoopbackOptions loopback;
            loopback.place = {rank, world_size};
            loopback.timeout = meeting.timeout;
            return CreateLoopback(loopback);
          };
          FSDP_ASSIGN_OR_RETURN(const auto communicator,
                                Connect(ranks[i], options));
          if (!absl::StrContains(communicator->ToString(), "loopback")) {
            return absl::InternalError(communicator->ToString());
          }
          return SumRanks(*communicator);
        });
    EXPECT_THAT(results, Each(::fsdp::testing::IsOk()));
  }
}

TEST(ConnectTest, ADevicesBackendThatFailsIsTold) {
  ConnectOptions options = Options();
  options.device = [](const DeviceMeeting& /*meeting*/)
      -> absl::StatusOr<std::unique_ptr<Communicator>> {
    return absl::FailedPreconditionError("there is no GPU");
  };
  EXPECT_THAT(Connect(Environment(), options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("there is no GPU")));
}

// Returns what the ranks' communicators say they are, and tries them. `hosts`
// are the names of the ranks' hosts.
std::vector<std::string> ConnectedBy(const std::vector<std::string>& hosts) {
  const auto world_size = static_cast<int>(hosts.size());
  const std::vector<Environment> ranks = RanksOfOneHost(world_size);
  std::vector<std::string> names(world_size);
  const std::vector<absl::Status> results =
      RunInThreads(world_size, [&](int i) -> absl::Status {
        ConnectOptions options = Options();
        options.host = hosts[i];
        FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                              Connect(ranks[i], options));
        names[i] = communicator->ToString();
        return SumRanks(*communicator);
      });
  EXPECT_THAT(results, Each(::fsdp::testing::IsOk()));
  return names;
}

TEST(ConnectTest, OtherHostsUseGlooAndSayWhy) {
  EXPECT_THAT(ConnectedBy({"a", "b"}),
              Each(HasSubstr("gloo without shared memory (every host has one "
                             "rank), rank")));
  EXPECT_THAT(ConnectedBy({"a", "b", "a", "b"}),
              Each(HasSubstr("(the ranks of a host do not follow each other")));
  EXPECT_THAT(ConnectedBy({"a", "a", "b"}),
              Each(HasSubstr("(the hosts do not have as many ranks each")));
}

TEST(ConnectTest, SeveralHostsCannotShareMemory) {
  const std::vector<Environment> ranks = RanksOfOneHost(2);
  const std::vector<absl::Status> results = RunInThreads(2, [&](int i) {
    ConnectOptions options = Options();
    options.backend = Backend::kSharedMemory;
    options.host = absl::StrCat("host ", i);
    return Connect(ranks[i], options).status();
  });
  EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                                     HasSubstr("not on one host"))));
}

TEST(ConnectTest, AnInheritedSocketIsUsedOnce) {
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  std::vector<Environment> ranks = RanksOfOneHost(2);
  for (Environment& rank : ranks) rank.master_port = listener.port;
  ranks[0].listen_fd = listener.fd.Release();
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
}

// torchrun starts ranks again with the same store, even without a new number of
// the attempt if hosts have gone.
TEST(ConnectTest, WhatAnAttemptHasLeftInTheAgentsStoreConfusesNoOther) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(RanksOfOneHost(1)[0].master_port);
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const std::pair<int, int> attempts[] = {{0, 3}, {1, 3}, {1, 2}};
  for (const auto& [restart, world_size] : attempts) {
    std::vector<Environment> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
      const std::map<std::string, std::string> variables = {
          {"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(world_size)},
          {"LOCAL_RANK", absl::StrCat(rank)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", absl::StrCat(agent->getPort())},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(restart)},
      };
      ASSERT_OK_AND_ASSIGN(
          Environment environment,
          ReadEnvironment([&variables](const char* name) -> const char* {
            const auto found = variables.find(name);
            return found == variables.end() ? nullptr : found->second.c_str();
          }));
      ranks.push_back(std::move(environment));
    }
    EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()))
        << "restart " << restart << ", " << world_size << " ranks";
  }
}

TEST(ParseBackendTest, KnowsItsNames) {
  EXPECT_EQ(*ParseBackend("auto"), Backend::kAuto);
  EXPECT_EQ(*ParseBackend("local"), Backend::kLocal);
  EXPECT_EQ(*ParseBackend("shared_memory"), Backend::kSharedMemory);
  EXPECT_EQ(*ParseBackend("gloo"), Backend::kGloo);
  EXPECT_THAT(
      ParseBackend("mpi"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("\"mpi\": expected auto, local, shared_memory")));
}

constexpr absl::Duration kShort = absl::Milliseconds(300);

TEST(ConnectTest, RanksMustFitTogether) {
  std::vector<Environment> ranks = RanksOfOneHost(3);
  ranks[1].world_size = 4;
  EXPECT_THAT(ConnectAll(ranks, Options()),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            AllOf(HasSubstr("one of 3"), HasSubstr("one of 4"),
                                  HasSubstr("same world size")))));
  ranks = RanksOfOneHost(3);
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

TEST(ConnectTest, ASilentRank0IsNamedUnlessAWishToStopEndsTheWait) {
  const Environment rank1 = RanksOfOneHost(2)[1];
  // Connections wait in the backlog forever, as with a stopped process.
  ASSERT_OK_AND_ASSIGN(const Listener silent,
                       Listen("127.0.0.1", rank1.master_port));
  EXPECT_THAT(Connect(rank1, Options(kShort)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("does not answer")));
  ConnectOptions options = Options(absl::Hours(1));
  options.stop_requested = [] { return true; };
  EXPECT_THAT(Connect(rank1, options), StatusIs(absl::StatusCode::kCancelled,
                                                HasSubstr("asked to stop")));
}

// Rank 0 waits for the goodbyes of those who have come, longer than the limit
// of the whole connection lets it.
TEST(ConnectTest, WaitingForGoodbyesChangesNothingInTheError) {
  const Environment rank0 = RanksOfOneHost(2)[0];
  std::thread visit([&] {
    FSDP_CHECK(
        ConnectTo("127.0.0.1", rank0.master_port, {absl::Now() + kLimit}).ok());
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
  const std::vector<absl::Status> results =
      ConnectAll(ranks, Options(absl::Seconds(1)));
  EXPECT_THAT(results[1], StatusIs(absl::StatusCode::kPermissionDenied,
                                   AllOf(HasSubstr("rank 1 of 3"),
                                         HasSubstr("for a stranger"),
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
  const std::vector<absl::Status> results = RunInThreads(3, [&](int i) {
    ConnectOptions options = Options(absl::Hours(1));
    options.backend = Backend::kGloo;
    if (i == 1) options.interface = "no_such_interface";
    return Connect(ranks[i], options).status();
  });
  EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("no_such_interface"))));
  for (int other : {0, 2}) {
    EXPECT_THAT(std::string(results[other].message()),
                HasSubstr(absl::StrCat("connecting rank ", other, " of 3")));
    EXPECT_THAT(std::string(results[other].message()), HasSubstr("rank 1: "));
  }
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
}

}  // namespace
}  // namespace fsdp::comm
