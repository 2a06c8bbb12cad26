// Ranks are threads here; bootstrap_launcher_test.cc has processes.

#include "comm/bootstrap/bootstrap.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/group/store_exchange.h"
#include "comm/group/wait_limits.h"
#include "comm/local/loopback_communicator.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/bootstrap_store.h"
#include "comm/startup/environment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(300);

int FreePort() { return Listen("127.0.0.1", 0)->port; }

// The environments of `world_size` ranks on this host.
std::vector<Environment> Ranks(int world_size) {
  Environment environment;
  environment.world_size = environment.local_world_size = world_size;
  environment.master_addr = "127.0.0.1";
  environment.master_port = FreePort();
  environment.started_by = StartedBy::kSlurm;
  std::vector<Environment> ranks(world_size, environment);
  for (int rank = 0; rank < world_size; ++rank) {
    ranks[rank].rank = ranks[rank].local_rank = rank;
  }
  return ranks;
}

ConnectOptions Options(absl::Duration connect_timeout = kLimit) {
  ConnectOptions options;
  options.connect_timeout = connect_timeout;
  options.timeout = kLimit;
  return options;
}

absl::Status RunInThreads(int num_threads,
                          const std::function<absl::Status(int)>& fn,
                          std::vector<absl::Status>* results) {
  results->resize(num_threads);
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] { (*results)[i] = fn(i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : *results) FSDP_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::Status SumRanks(Communicator& communicator) {
  const int n = communicator.world_size();
  const at::Tensor sum = at::full({1}, communicator.rank(), at::kLong);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        communicator.AllReduce(sum, ReduceOp::kSum, "ranks"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + kLimit));
  if (sum.item<int64_t>() == n * (n - 1) / 2) return absl::OkStatus();
  return absl::InternalError("the sum of the ranks is wrong");
}

// Connects all and adds their ranks up.
std::vector<absl::Status> ConnectAll(const std::vector<Environment>& ranks,
                                     const ConnectOptions& options) {
  std::vector<absl::Status> results;
  RunInThreads(
      static_cast<int>(ranks.size()),
      [&](int i) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                              Connect(ranks[i], options));
        if (communicator->default_timeout() != options.timeout) {
          return absl::InternalError("the timeout is wrong");
        }
        return SumRanks(*communicator);
      },
      &results)
      .IgnoreError();
  return results;
}

TEST(ConnectTest, OneRankNeedsNoNetwork) {
  ASSERT_OK_AND_ASSIGN(const auto communicator, Connect(Environment()));
  EXPECT_THAT(communicator->ToString(), HasSubstr("local"));
  EXPECT_OK(SumRanks(*communicator));
}

TEST(ConnectTest, OneRankMayUseGloo) {
  ConnectOptions options = Options();
  options.backend = Backend::kGloo;
  ASSERT_OK_AND_ASSIGN(const auto communicator,
                       Connect(Environment(), options));
  EXPECT_THAT(communicator->ToString(), HasSubstr("gloo"));
  EXPECT_OK(SumRanks(*communicator));
}

// Ranks find each other in the place that the device's backend is given.
TEST(ConnectTest, ADevicesBackendIsPairedWithTheHosts) {
  for (const int world_size : {1, 3}) {
    const std::vector<Environment> ranks =
        world_size == 1 ? std::vector<Environment>(1) : Ranks(world_size);
    std::vector<absl::Status> results;
    EXPECT_OK(RunInThreads(
        world_size,
        [&](int i) -> absl::Status {
          ConnectOptions options = Options();
          options.device = [&](const DeviceMeeting& meeting)
              -> absl::StatusOr<std::unique_ptr<Communicator>> {
            const int rank = meeting.host.rank();
            FSDP_ASSIGN_OR_RETURN(
                const std::vector<std::string> names,
                ExchangeByStore(meeting.store, "names", rank, world_size,
                                absl::StrCat("rank ", rank),
                                absl::Now() + kLimit));
            if (names.back() != absl::StrCat("rank ", world_size - 1)) {
              return absl::InternalError("another name");
            }
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
        },
        &results));
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

// What the ranks' communicators are, which all work; `hosts` are the names of
// the ranks' hosts.
std::vector<std::string> ConnectedBy(const std::vector<std::string>& hosts) {
  const auto world_size = static_cast<int>(hosts.size());
  const std::vector<Environment> ranks = Ranks(world_size);
  std::vector<std::string> names(world_size);
  std::vector<absl::Status> results;
  EXPECT_OK(RunInThreads(
      world_size,
      [&](int i) -> absl::Status {
        ConnectOptions options = Options();
        options.host = hosts[i];
        FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                              Connect(ranks[i], options));
        names[i] = communicator->ToString();
        return SumRanks(*communicator);
      },
      &results));
  return names;
}

TEST(ConnectTest, RanksOfOneHostShareMemory) {
  EXPECT_THAT(ConnectedBy({"a", "a", "a"}),
              Each(HasSubstr("shared memory, rank")));
}

TEST(ConnectTest, HostsWithSeveralRanksEachAreHierarchical) {
  const std::vector<std::string> names = ConnectedBy({"a", "a", "b", "b"});
  EXPECT_THAT(names, Each(HasSubstr("hierarchical (shared memory inside 2 "
                                    "hosts, gloo between them)")));
  EXPECT_THAT(names[3], HasSubstr("rank 3 of 4"));
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
  std::vector<absl::Status> results;
  const std::vector<Environment> ranks = Ranks(2);
  RunInThreads(
      2,
      [&](int i) {
        ConnectOptions options = Options();
        options.backend = Backend::kSharedMemory;
        options.host = absl::StrCat("host ", i);
        return Connect(ranks[i], options).status();
      },
      &results)
      .IgnoreError();
  EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                                     HasSubstr("not on one host"))));
}

TEST(ConnectTest, RanksMeet) {
  for (const int world_size : {2, 3}) {
    EXPECT_THAT(ConnectAll(Ranks(world_size), Options()),
                Each(::fsdp::testing::IsOk()));
  }
}

TEST(ConnectTest, TheSamePlaceServesOneGroupAfterTheOther) {
  const std::vector<Environment> ranks = Ranks(2);
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
}

TEST(ConnectTest, AnInheritedSocketIsUsedOnce) {
  ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
  std::vector<Environment> ranks = Ranks(2);
  for (Environment& rank : ranks) rank.master_port = listener.port;
  ranks[0].listen_fd = listener.fd.Release();
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
}

TEST(ConnectTest, RanksMeetInTheStoreOfTorchrunsAgent) {
  std::vector<Environment> ranks = Ranks(2);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks[0].master_port);
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  for (Environment& rank : ranks) {
    rank.agent_store = true;
    rank.agent_store_prefix = "/worker/attempt_0";
  }
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(::fsdp::testing::IsOk()));
}

TEST(ConnectTest, WorldSizesMustAgree) {
  std::vector<Environment> ranks = Ranks(3);
  ranks[1].world_size = 4;
  EXPECT_THAT(ConnectAll(ranks, Options()),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            AllOf(HasSubstr("one of 3"), HasSubstr("one of 4"),
                                  HasSubstr("same world size")))));
}

TEST(ConnectTest, TwoProcessesCannotBeTheSameRank) {
  std::vector<Environment> ranks = Ranks(3);
  ranks[2].rank = 1;
  EXPECT_THAT(ConnectAll(ranks, Options()),
              Each(StatusIs(absl::StatusCode::kAlreadyExists,
                            HasSubstr("two processes came as rank 1 of 3"))));
}

TEST(ConnectTest, APortInUseIsNamed) {
  const Environment rank0 = Ranks(2)[0];
  ASSERT_OK_AND_ASSIGN(const Listener other,
                       Listen("127.0.0.1", rank0.master_port));
  EXPECT_THAT(Connect(rank0, Options()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("rank 0 of 2"),
                             HasSubstr(absl::StrCat("port ", rank0.master_port,
                                                    " is already in use")),
                             HasSubstr("choose another MASTER_PORT"))));
}

TEST(ConnectTest, AnAbsentRank0IsNamed) {
  const Environment rank1 = Ranks(2)[1];
  EXPECT_THAT(
      Connect(rank1, Options(kShort)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("rank 1 of 2"), HasSubstr("nobody answers"),
                     HasSubstr("does rank 0 run there"))));
}

TEST(ConnectTest, ASilentRank0IsNamed) {
  const Environment rank1 = Ranks(2)[1];
  // Connections wait in the backlog for ever, as with a stopped process.
  ASSERT_OK_AND_ASSIGN(const Listener silent,
                       Listen("127.0.0.1", rank1.master_port));
  EXPECT_THAT(Connect(rank1, Options(kShort)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("does not answer")));
}

// Rank 0 waits for the goodbyes of those who have come, longer than the limit
// of the whole connection lets it.
TEST(ConnectTest, WaitingForGoodbyesChangesNothingInTheError) {
  const Environment rank0 = Ranks(2)[0];
  std::thread visit([&] {
    FSDP_CHECK(WaitUntilReachable("127.0.0.1", rank0.master_port,
                                  {absl::Now() + kLimit})
                   .ok());
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(rank0.master_port);
    options.waitWorkers = false;
    c10d::TCPStore visitor("127.0.0.1", options);
    visitor.add("/fsdp/visitors", 1);
  });
  EXPECT_THAT(Connect(rank0, Options(absl::Seconds(1))),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("1 of 2 ranks met"),
                             HasSubstr("missing: rank 1"))));
  visit.join();
}

TEST(ConnectTest, ARankThatFailsTellsTheOthers) {
  const std::vector<Environment> ranks = Ranks(3);
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
  const Environment rank1 = Ranks(2)[1];
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
  EXPECT_THAT(Connect(Ranks(2)[0], local),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("threads of one process"),
                             HasSubstr("Slurm started 2 processes"))));
  Environment environment = Ranks(2)[0];
  environment.rank = 2;
  EXPECT_THAT(Connect(environment), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("rank 2 of 2")));
  environment = Ranks(2)[0];
  environment.master_addr.clear();
  EXPECT_THAT(Connect(environment), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("an address")));
  ConnectOptions interface = Options();
  interface.backend = Backend::kGloo;
  interface.interface = "no_such_interface";
  EXPECT_THAT(ConnectAll(Ranks(2), interface)[0].message(),
              HasSubstr("no_such_interface"));
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

std::vector<absl::Status> MeetAll(const std::vector<Environment>& ranks,
                                  const WaitLimits& limits,
                                  std::vector<MeetingPlace>* places) {
  places->resize(ranks.size());
  std::vector<absl::Status> results;
  RunInThreads(
      static_cast<int>(ranks.size()),
      [&](int i) {
        // So that `limits` are asked for nothing but the wait for other ranks.
        if (ranks[i].rank > 0) {
          WaitUntilReachable(ranks[i].master_addr, ranks[i].master_port,
                             {absl::Now() + kLimit})
              .IgnoreError();
        }
        Suspect suspect("nobody");
        return Meet(ranks[i], limits, &suspect, &(*places)[i]);
      },
      &results)
      .IgnoreError();
  return results;
}

std::vector<MeetingPlace> MeetAll(const std::vector<Environment>& ranks) {
  std::vector<MeetingPlace> places;
  for (const absl::Status& met :
       MeetAll(ranks, {absl::Now() + kLimit}, &places)) {
    FSDP_CHECK(met.ok());
  }
  return places;
}

// Ranks 0 and 2 of 4, whose limits are over once both wait for the others.
std::vector<absl::Status> MeetWithTwoMissing(
    const std::function<void(WaitLimits* limits,
                             std::function<bool()> both_wait)>& set_limits) {
  std::vector<Environment> ranks = Ranks(4);
  ranks.erase(ranks.begin() + 3);
  ranks.erase(ranks.begin() + 1);
  absl::Mutex mutex;
  std::set<std::thread::id> waiting;
  WaitLimits limits{absl::Now() + kLimit};
  set_limits(&limits, [&] {
    absl::MutexLock lock(&mutex);
    waiting.insert(std::this_thread::get_id());
    return waiting.size() == 2;
  });
  std::vector<MeetingPlace> places;
  const std::vector<absl::Status> results = MeetAll(ranks, limits, &places);
  // The first to say goodbye must not be rank 0, which waits for the others.
  std::reverse(places.begin(), places.end());
  while (!places.empty()) places.erase(places.begin());
  return results;
}

TEST(MeetTest, AMissingRankIsNamed) {
  const std::vector<absl::Status> results =
      MeetWithTwoMissing([](WaitLimits* limits, auto both_wait) {
        limits->now = [both_wait] {
          return both_wait() ? absl::InfiniteFuture() : absl::Now();
        };
      });
  EXPECT_THAT(
      results,
      Each(StatusIs(absl::StatusCode::kDeadlineExceeded,
                    AllOf(HasSubstr("2 of 4 ranks met at 127.0.0.1:"),
                          HasSubstr("missing: ranks 1, 3 (started by Slurm; "
                                    "ranks are those that srun starts)")))));
}

TEST(MeetTest, AWishToStopIsHeardWhereRanksWait) {
  const std::vector<absl::Status> results =
      MeetWithTwoMissing([](WaitLimits* limits, auto both_wait) {
        limits->stop_requested = both_wait;
      });
  const absl::Status& own =
      absl::IsCancelled(results[0]) ? results[0] : results[1];
  EXPECT_THAT(own, StatusIs(absl::StatusCode::kCancelled,
                            HasSubstr("was asked to stop while it waited")));
  for (const absl::Status& result : results) {
    EXPECT_TRUE(absl::IsCancelled(result) || absl::IsAborted(result)) << result;
  }
}

TEST(MeetTest, Rank0StaysUntilTheOthersHaveLeft) {
  std::vector<MeetingPlace> places = MeetAll(Ranks(2));
  std::thread leave([&places] { places[0].store.reset(); });
  // Rank 0, the first or second to enter, says goodbye first and then waits.
  while (!places[1].store->check({"goodbye/1"}) &&
         !places[1].store->check({"goodbye/2"})) {
  }
  places[1].store->set("still", "there");
  EXPECT_EQ(places[1].store->get_to_str("still"), "there");
  places[1].store.reset();
  leave.join();
}

TEST(MeetTest, Rank0DoesNotWaitForEver) {
  std::vector<MeetingPlace> places = MeetAll(Ranks(2));
  const absl::Time begin = absl::Now();
  places[0].store.reset();
  EXPECT_LT(absl::Now() - begin, kLimit);
}

}  // namespace
}  // namespace fsdp::comm
