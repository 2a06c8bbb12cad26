// Ranks that meet in a store of their own, as Meet() makes it, or in one that
// others serve for longer than they live.
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/job_store.h"
#include "comm/meeting/meeting.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/ranks_of_one_host.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::ConnectAll;
using ::fsdp::comm::testing::kLimit;
using ::fsdp::comm::testing::Options;
using ::fsdp::comm::testing::RanksOfOneHost;
using ::fsdp::comm::testing::RunInThreads;
using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::IsOk;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<absl::Status> MeetAll(const std::vector<Environment>& ranks,
                                  const WaitLimits& limits,
                                  std::vector<MeetingPlace>* places) {
  places->resize(ranks.size());
  return RunInThreads(static_cast<int>(ranks.size()), [&](int i) {
    // After this, `limits` are asked only while waiting for other ranks.
    if (ranks[i].rank > 0) {
      ConnectTo(ranks[i].master_addr, ranks[i].master_port,
                {absl::Now() + kLimit})
          .IgnoreError();
    }
    Suspect suspect("nobody");
    return Meet(ranks[i], limits, &suspect, &(*places)[i]);
  });
}

std::vector<MeetingPlace> MeetAll(const std::vector<Environment>& ranks) {
  std::vector<MeetingPlace> places;
  for (const absl::Status& met :
       MeetAll(ranks, {absl::Now() + kLimit}, &places)) {
    FSDP_CHECK(met.ok());
  }
  return places;
}

using Condition = std::function<bool()>;

// Lets ranks 0 and 2 of 4 meet. Their limits are over once both wait for the
// others.
std::vector<absl::Status> MeetWithTwoMissing(
    const std::function<void(WaitLimits* limits, const Condition& both_wait)>&
        set_limits) {
  std::vector<Environment> ranks = RanksOfOneHost(4);
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
  std::vector<absl::Status> results = MeetAll(ranks, limits, &places);
  // The first to say goodbye must not be rank 0, which waits for the others.
  std::reverse(places.begin(), places.end());
  while (!places.empty()) places.erase(places.begin());
  return results;
}

TEST(MeetTest, AMissingRankIsNamed) {
  const std::vector<absl::Status> results =
      MeetWithTwoMissing([](WaitLimits* limits, const Condition& both_wait) {
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
      MeetWithTwoMissing([](WaitLimits* limits, const Condition& both_wait) {
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
  std::vector<MeetingPlace> places = MeetAll(RanksOfOneHost(2));
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
  std::vector<MeetingPlace> places = MeetAll(RanksOfOneHost(2));
  const absl::Time begin = absl::Now();
  places[0].store.reset();
  EXPECT_LT(absl::Now() - begin, kLimit);
}

constexpr char kSecret[] = "of the job";
constexpr absl::Duration kShort = absl::Milliseconds(300);

class KeptStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(Listener listener, Listen("127.0.0.1", 0));
    port_ = listener.port;
    ASSERT_OK_AND_ASSIGN(keeper_,
                         StoreServer::Start(std::move(listener.fd), kSecret));
  }

  std::vector<Environment> Group(int world_size, const std::string& prefix) {
    std::vector<Environment> ranks = RanksOfOneHost(world_size);
    for (Environment& rank : ranks) {
      rank.master_port = port_;
      rank.secret = kSecret;
      rank.kept_store = true;
      rank.kept_store_prefix = prefix;
    }
    return ranks;
  }

  std::unique_ptr<StoreServer> keeper_;
  int port_ = 0;
};

TEST_F(KeptStoreTest, ItComesBeforeAnAgentsStore) {
  std::vector<Environment> ranks = Group(2, "group");
  for (Environment& rank : ranks) {
    rank.agent_store = true;
    rank.agent_store_prefix = "/worker/attempt_0";
  }
  EXPECT_THAT(ConnectAll(ranks, Options()), Each(IsOk()));
}

TEST_F(KeptStoreTest, NobodyWaitsForRank0OrSaysGoodbye) {
  std::vector<MeetingPlace> places = MeetAll(Group(3, "group"));
  places[0].store.reset();
  places[1].store.reset();
  EXPECT_FALSE(places[2].store->check({"visitors"}));
  EXPECT_FALSE(places[2].store->check({"goodbye/1"}));
  places[2].store->set("still", "there");
  EXPECT_EQ(places[2].store->get_to_str("still"), "there");
}

// The remains of a group whose ranks have failed are in no other group's way.
TEST_F(KeptStoreTest, AGroupAfterOneThatHasFailed) {
  for (const Backend backend : {Backend::kGloo, Backend::kAuto}) {
    ConnectOptions options = Options();
    options.backend = backend;
    const std::string prefix = absl::StrCat(static_cast<int>(backend));
    const std::vector<Environment> first = Group(3, prefix + "/first");
    const std::vector<absl::Status> results =
        RunInThreads(3, [&](int i) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> ranks,
                                Connect(first[i], options));
          FSDP_RETURN_IF_ERROR(SumRanks(*ranks));
          if (i == 1) ranks->Abort(absl::NotFoundError("rank 1 has no data"));
          return SumRanks(*ranks);
        });
    EXPECT_THAT(results, Each(StatusIs(absl::StatusCode::kAborted,
                                       HasSubstr("rank 1 has no data"))));
    EXPECT_THAT(ConnectAll(Group(2, prefix + "/second"), options),
                Each(IsOk()));
  }
}

TEST_F(KeptStoreTest, WhatAGroupHasLeftCanBeDeleted) {
  ASSERT_OK_AND_ASSIGN(const auto store,
                       JobStore::Connect({"127.0.0.1", port_, kSecret}, kLimit,
                                         {absl::Now() + kLimit}));
  store->set("of nobody", "1");
  for (const Backend backend : {Backend::kGloo, Backend::kAuto}) {
    ConnectOptions options = Options();
    options.backend = backend;
    EXPECT_THAT(ConnectAll(Group(3, "group/1"), options), Each(IsOk()));
    EXPECT_THAT(ConnectAll(Group(2, "group/10"), options), Each(IsOk()));
    const int64_t keys = store->getNumKeys();
    const int64_t deleted = store->DeleteAll("group/1/");
    EXPECT_GT(deleted, 3);
    EXPECT_EQ(store->getNumKeys(), keys - deleted);
    EXPECT_GT(store->DeleteAll("group/10/"), 2);
    EXPECT_EQ(store->getNumKeys(), 1);
  }
}

TEST_F(KeptStoreTest, APrefixIsUsedOnce) {
  EXPECT_THAT(ConnectAll(Group(2, "group"), Options()), Each(IsOk()));
  EXPECT_THAT(ConnectAll(Group(2, "group"), Options()),
              Each(StatusIs(absl::StatusCode::kAlreadyExists, ::testing::_)));
}

TEST_F(KeptStoreTest, AKeeperThatIsGoneIsNamed) {
  const std::vector<Environment> ranks = Group(2, "group");
  keeper_.reset();
  EXPECT_THAT(ConnectAll(ranks, Options(kShort)),
              Each(StatusIs(absl::StatusCode::kDeadlineExceeded,
                            AllOf(HasSubstr("nobody answers"),
                                  HasSubstr("does the keeper run there")))));
}

TEST_F(KeptStoreTest, RefusesAGroupWithoutAPrefix) {
  EXPECT_THAT(Connect(Group(2, "")[0], Options()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("kept_store_prefix is empty")));
}

}  // namespace
}  // namespace fsdp::comm
