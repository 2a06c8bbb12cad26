// Tests Meet() as ranks of one group use it.
#include <algorithm>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/meeting.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_in_threads.h"
#include "comm/testing/ranks_of_one_host.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::kLimit;
using ::fsdp::comm::testing::RanksOfOneHost;
using ::fsdp::comm::testing::RunInThreads;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<absl::Status> MeetAll(const std::vector<Environment>& ranks,
                                  const WaitLimits& limits,
                                  std::vector<MeetingPlace>* places) {
  places->resize(ranks.size());
  std::vector<absl::Status> results;
  RunInThreads(
      static_cast<int>(ranks.size()),
      [&](int i) {
        // After this, `limits` are asked only while waiting for other ranks.
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
  const std::vector<absl::Status> results = MeetAll(ranks, limits, &places);
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

}  // namespace
}  // namespace fsdp::comm
