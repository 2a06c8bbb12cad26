#include "comm/group/connect_together.h"

#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

using Connect = std::function<absl::Status(int rank)>;

WaitLimits NoLimits() { return {absl::InfiniteFuture()}; }

std::vector<absl::Status> RunRanks(
    int world_size, const Connect& connect,
    const WaitLimits& limits = NoLimits(),
    const c10::intrusive_ptr<c10d::Store>& store =
        c10::make_intrusive<c10d::HashStore>()) {
  std::vector<absl::Status> results(world_size);
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      // A thread that is left behind may begin after the end of this test.
      results[rank] =
          ConnectTogether(store, rank, RankNames(world_size), limits,
                          [connect, rank] { return connect(rank); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// Waits forever, as a rank may. `hang` outlives the threads that are left
// behind.
struct Hang {
  std::shared_ptr<absl::Notification> never =
      std::make_shared<absl::Notification>();
  absl::Status operator()() const {
    const auto held = never;
    held->WaitForNotification();
    return absl::OkStatus();
  }
};

TEST(ConnectTogetherTest, TheFirstFailureIsTheCause) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const absl::Status first =
      ConnectTogether(store, 1, RankNames(2), NoLimits(),
                      [] { return absl::ResourceExhaustedError("no memory"); });
  EXPECT_THAT(first,
              StatusIs(Code::kResourceExhausted, HasSubstr("no memory")));
  EXPECT_THAT(
      ConnectTogether(store, 0, RankNames(2), NoLimits(),
                      [] { return absl::UnavailableError("rank 1 is gone"); }),
      StatusIs(Code::kResourceExhausted, HasSubstr("rank 1: no memory")));
}

TEST(ConnectTogetherTest, NamesWhoIsNotThroughAtTheDeadline) {
  const Hang hang;
  // The deadline has passed as soon as ranks 0 and 1 are through.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  WaitLimits limits{absl::UnixEpoch()};
  limits.now = [store] {
    return store->check({"through/0", "through/1"}) ? absl::InfiniteFuture()
                                                    : absl::InfinitePast();
  };
  const std::vector<absl::Status> results = RunRanks(
      3, [hang](int rank) { return rank == 2 ? hang() : absl::OkStatus(); },
      limits, store);
  EXPECT_THAT(
      results,
      Each(StatusIs(Code::kDeadlineExceeded,
                    ::testing::AllOf(HasSubstr("at the deadline: rank 2"),
                                     Not(HasSubstr("rank 0, ")),
                                     Not(HasSubstr("rank 1, "))))));
}

TEST(ConnectTogetherTest, AWishToStopIsHeardByAll) {
  const Hang hang;
  WaitLimits limits = NoLimits();
  limits.stop_requested = [] { return true; };
  EXPECT_THAT(RunRanks(
                  2, [hang](int) { return hang(); }, limits),
              Each(StatusIs(Code::kCancelled, HasSubstr("asked to stop"))));
}

TEST(ConnectTogetherTest, ARankWithoutThreadsTellsTheOthers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [] { return absl::OkStatus(); };
  {
    const ::fsdp::testing::NoThreads none;
    EXPECT_THAT(
        ConnectTogether(store, 1, RankNames(2), NoLimits(), connect),
        StatusIs(Code::kResourceExhausted, HasSubstr("cannot start a thread")));
  }
  EXPECT_THAT(ConnectTogether(store, 0, RankNames(2), NoLimits(), connect),
              StatusIs(Code::kResourceExhausted,
                       HasSubstr("rank 1: cannot start a thread")));
}

TEST(ConnectTogetherTest, NobodysTextIsTrusted) {
  for (const std::string text :
       {"x", "1", "1 ", "1 x", "1 99 text", "1 0 all is well", "one 5 text",
        "99999999999 5 text", "\xff\xff"}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    store->c10d::Store::set("failure", text);
    EXPECT_THAT(ConnectTogether(store, 0, RankNames(2), NoLimits(),
                                [] { return absl::OkStatus(); }),
                StatusIs(Code::kUnavailable, HasSubstr("cannot be read")))
        << text;
  }
}

TEST(ExchangeByStoreTest, NobodysErrorIsTrusted) {
  for (const char* const text : {"0 all is well", "99 text", "text", ""}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    store->c10d::Store::set("gpus/1",
                            std::string("\0failed ", 8) + std::string(text));
    EXPECT_THAT(ExchangeByStore(store, "gpus", 0, RankNames(2), "here",
                                absl::InfiniteFuture()),
                StatusIs(Code::kUnavailable, HasSubstr("rank 1: ")))
        << text;
  }
}

TEST(CallInTimeTest, IsOverWithAllThatItHolds) {
  auto held = std::make_shared<std::thread::id>();
  const std::weak_ptr<std::thread::id> seen = held;
  std::thread::id caller;
  EXPECT_TRUE(CallInTime([held = std::move(held),
                          &caller] { caller = std::this_thread::get_id(); },
                         absl::Now() + absl::Seconds(30)));
  EXPECT_NE(caller, std::thread::id());
  EXPECT_NE(caller, std::this_thread::get_id());
  EXPECT_TRUE(seen.expired());
}

TEST(CallInTimeTest, WhatTakesLongerIsLeftBehind) {
  struct Shared {
    absl::Notification go_on;
    absl::Notification gone;
  };
  const auto shared = std::make_shared<Shared>();
  EXPECT_FALSE(CallInTime(
      [shared] {
        shared->go_on.WaitForNotification();
        shared->gone.Notify();
      },
      absl::Now()));
  EXPECT_FALSE(shared->gone.HasBeenNotified());
  shared->go_on.Notify();
  EXPECT_TRUE(shared->gone.WaitForNotificationWithTimeout(absl::Seconds(30)));
}

TEST(CallInTimeTest, WithoutAThreadItDoesNotRun) {
  const ::fsdp::testing::NoThreads none;
  bool ran = false;
  EXPECT_FALSE(CallInTime([&] { ran = true; }, absl::InfiniteFuture()));
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace fsdp::comm
