#include "comm/group/operation_queue.h"

#include "absl/synchronization/notification.h"
#include "base/testing/status_matchers.h"

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

}  // namespace
}  // namespace fsdp::comm
