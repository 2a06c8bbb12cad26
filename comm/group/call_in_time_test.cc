#include <memory>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/no_threads.h"
#include "comm/group/connect_together.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

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
