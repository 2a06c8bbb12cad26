#include "comm/group/operation_queue.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(30);

// Returns whether the operation succeeds, in a time that no test needs.
bool Succeeds(OperationQueue& queue,
              const std::shared_ptr<OperationQueue::Operation>& operation) {
  return queue.Wait(
      *operation, absl::Now() + kLimit, [] { ADD_FAILURE() << "not done"; },
      absl::ZeroDuration());
}

// An operation that has begun and goes on until it is told to end.
struct Held {
  OperationQueue::Run Run() {
    return [this] {
      begun.Notify();
      end.WaitForNotification();
      return absl::OkStatus();
    };
  }

  absl::Notification begun;
  absl::Notification end;
};

TEST(OperationQueueTest, RunsOneAfterTheOther) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  std::vector<std::string> order;
  std::shared_ptr<OperationQueue::Operation> last;
  for (int i = 0; i < 3; ++i) {
    last = queue.Post(absl::StrCat("operation ", i), [&order, i] {
      order.push_back(absl::StrCat(i));
      return absl::OkStatus();
    });
  }
  EXPECT_TRUE(Succeeds(queue, last));
  EXPECT_TRUE(queue.IsDone(*last));
  EXPECT_EQ(OperationQueue::NameOf(*last), "operation 2");
  EXPECT_THAT(order, ::testing::ElementsAre("0", "1", "2"));
}

TEST(OperationQueueTest, AnErrorIsTheOperationsAlone) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  const auto fails =
      queue.Post("one", [] { return absl::UnavailableError("gone"); });
  const auto works = queue.Post("two", [] { return absl::OkStatus(); });
  EXPECT_FALSE(Succeeds(queue, fails));
  EXPECT_TRUE(Succeeds(queue, works));
}

TEST(OperationQueueTest, WhatAnOperationHoldsIsGoneWhenItIsDone) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  auto buffer = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = buffer;
  const auto operation = queue.Post(
      "one", [buffer = std::move(buffer)] { return absl::OkStatus(); });
  EXPECT_TRUE(Succeeds(queue, operation));
  EXPECT_TRUE(seen.expired());
}

TEST(OperationQueueTest, SaysWhatIsNext) {
  EXPECT_EQ(OperationQueue().Cancel(), "has called nothing yet");
  OperationQueue queue;
  EXPECT_EQ(queue.NameOfNext(), "nothing");
  Held held;
  const auto operation = queue.Post("one", held.Run());
  EXPECT_EQ(queue.NameOfNext(), "one");
  ASSERT_OK(queue.Start("for a test"));
  held.begun.WaitForNotification();
  EXPECT_EQ(queue.NameOfNext(), "one");
  held.end.Notify();
  EXPECT_TRUE(Succeeds(queue, operation));
  EXPECT_EQ(queue.NameOfNext(), "nothing");
}

TEST(OperationQueueTest, CancelsWhatHasNotBegun) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  Held held;
  const auto running = queue.Post("one", held.Run());
  bool ran = false;
  const auto waiting = queue.Post("two", [&ran] {
    ran = true;
    return absl::OkStatus();
  });
  held.begun.WaitForNotification();
  EXPECT_EQ(queue.Cancel(), "is in one");
  EXPECT_EQ(queue.Post("three", [] { return absl::OkStatus(); }), nullptr);
  held.end.Notify();
  EXPECT_TRUE(Succeeds(queue, running));
  EXPECT_FALSE(Succeeds(queue, waiting));
  EXPECT_FALSE(ran);
  EXPECT_EQ(queue.Cancel(), "has finished one and called nothing since");
}

TEST(OperationQueueTest, GivesUpAtTheDeadlineAndStaysForTheBuffers) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  Held held;
  const auto operation = queue.Post("one", held.Run());
  int given_up = 0;
  EXPECT_FALSE(queue.Wait(
      *operation, absl::Now(), [&] { ++given_up; }, absl::Milliseconds(1)));
  EXPECT_EQ(given_up, 1);
  EXPECT_FALSE(queue.IsDone(*operation));
  const auto give_up = [&] {
    ++given_up;
    held.end.Notify();
  };
  EXPECT_TRUE(queue.Wait(*operation, absl::InfinitePast(), give_up, kLimit));
  EXPECT_EQ(given_up, 2);
}

TEST(OperationQueueTest, FinishesWhatHasBeenPosted) {
  OperationQueue queue;
  ASSERT_OK(queue.Start("for a test"));
  Held held;
  const auto first = queue.Post("one", held.Run());
  const auto second = queue.Post("two", [] { return absl::OkStatus(); });
  held.begun.WaitForNotification();
  const auto farewell = queue.Finish();
  ASSERT_TRUE(farewell.has_value());
  EXPECT_TRUE(farewell->unfinished);
  EXPECT_EQ(farewell->position, "is in one");
  EXPECT_FALSE(queue.Finish().has_value());
  held.end.Notify();
  queue.Join();
  EXPECT_TRUE(Succeeds(queue, first));
  EXPECT_TRUE(Succeeds(queue, second));
}

// The destructor cancels, waits for the operation that runs, and drops the
// others.
TEST(OperationQueueTest, IsDestroyedWithOperationsPending) {
  auto buffer = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = buffer;
  bool finished = false;
  bool ran = false;
  {
    OperationQueue queue;
    ASSERT_OK(queue.Start("for a test"));
    absl::Notification begun;
    queue.Post("one", [&] {
      begun.Notify();
      const auto next = [] { return absl::OkStatus(); };
      const absl::Time deadline = absl::Now() + kLimit;
      while (queue.Post("next", next) != nullptr) {
        if (absl::Now() > deadline) return absl::DeadlineExceededError("");
        std::this_thread::yield();
      }
      finished = true;
      return absl::OkStatus();
    });
    queue.Post("two", [&ran, buffer = std::move(buffer)] {
      ran = true;
      return absl::OkStatus();
    });
    begun.WaitForNotification();
  }
  EXPECT_TRUE(finished);
  EXPECT_FALSE(ran);
  EXPECT_TRUE(seen.expired());
}

TEST(OperationQueueTest, SaysWhatNeedsAThread) {
  const ::fsdp::testing::NoThreads none;
  OperationQueue queue;
  EXPECT_THAT(queue.Start("for a test"),
              ::fsdp::testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                        ::testing::HasSubstr("for a test")));
}

}  // namespace
}  // namespace fsdp::comm
