#include "comm/group/operation_watchdog.h"

#include <ATen/ops/zeros.h>

#include "absl/synchronization/notification.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;

using State = OperationWatchdog::State;
using OperationPtr = std::shared_ptr<OperationWatchdog::Operation>;

absl::Time At(int seconds) { return absl::FromUnixSeconds(seconds); }

Call GatherOf(std::string label) {
  return {Collective::kAllGather, std::move(label), "bfloat16", 1024, ""};
}

// A device whose first `num_done` operations are done.
class OperationWatchdogTest : public ::testing::Test {
 protected:
  OperationPtr Launch(absl::Time deadline = At(100)) {
    const int number = num_launched_++;
    OperationPtr operation =
        watchdog_.Begin(GatherOf("blocks.2"), 2048, deadline);
    watchdog_.Launched(*operation, [this, number]() -> absl::StatusOr<bool> {
      if (!query_error_.ok()) return query_error_;
      return number < num_done_;
    });
    return operation;
  }

  int num_launched_ = 0;
  int num_done_ = 0;
  absl::Status query_error_;
  absl::Status health_;
  std::vector<OperationWatchdog::Failure> stops_;
  OperationWatchdog watchdog_{{[this] { return health_; },
                               [this](const OperationWatchdog::Failure& why) {
                                 stops_.push_back(why);
                               }}};
};

TEST_F(OperationWatchdogTest, OperationsAreDoneWhenTheDeviceSaysSo) {
  const OperationPtr first = Launch();
  const OperationPtr second = Launch();
  EXPECT_EQ(watchdog_.StateOf(*first), State::kRunning);
  num_done_ = 1;
  EXPECT_EQ(watchdog_.StateOf(*second), State::kRunning);
  EXPECT_EQ(watchdog_.StateOf(*first), State::kDone);
  EXPECT_FALSE(watchdog_.idle());
  num_done_ = 2;
  watchdog_.Poll(At(0));
  EXPECT_TRUE(watchdog_.idle());
  EXPECT_EQ(watchdog_.StateOf(*second), State::kDone);
  EXPECT_TRUE(stops_.empty());
}

TEST_F(OperationWatchdogTest, WhatIsNotLaunchedYetRuns) {
  const OperationPtr operation =
      watchdog_.Begin(GatherOf("blocks.2"), 2048, At(5));
  watchdog_.Poll(At(5));
  EXPECT_EQ(watchdog_.StateOf(*operation), State::kRunning);
  watchdog_.Poll(At(6));
  EXPECT_EQ(watchdog_.StateOf(*operation), State::kFailed);
}

TEST_F(OperationWatchdogTest, TheOldestOperationsDeadlineEndsTheGroup) {
  const OperationPtr first = Launch(At(10));
  const OperationPtr second = Launch(At(20));
  EXPECT_EQ(second->Describe("rank 1 of 4"),
            "all-gather #1 of blocks.2 on rank 1 of 4 (bfloat16 x 1024, 2048 "
            "bytes)");
  const OperationPtr third = Launch(At(30));
  num_done_ = 1;
  watchdog_.Poll(At(20));  // not before it, and the first is done
  EXPECT_EQ(watchdog_.failure().has_value(), false);
  watchdog_.Poll(At(21));
  ASSERT_EQ(stops_.size(), 1);
  EXPECT_EQ(stops_[0].report.cause, Cause::kDeadline);
  EXPECT_EQ(stops_[0].report.text, "not done at the deadline");
  EXPECT_EQ(stops_[0].report.position, "is in all-gather #1 of blocks.2");
  EXPECT_FALSE(stops_[0].status.has_value());
  EXPECT_EQ(watchdog_.StateOf(*first), State::kDone);
  EXPECT_EQ(watchdog_.StateOf(*second), State::kFailed);
  EXPECT_EQ(watchdog_.StateOf(*third), State::kFailed);
}

TEST_F(OperationWatchdogTest, WhatWasDoneBeforeTheFailureStaysDone) {
  const OperationPtr first = Launch();
  const OperationPtr second = Launch();
  num_done_ = 1;  // nobody has asked yet
  watchdog_.Fail(absl::AbortedError("enough"));
  num_done_ = 2;  // an abort ends the kernels, and events say done
  EXPECT_EQ(watchdog_.StateOf(*first), State::kDone);
  EXPECT_EQ(watchdog_.StateOf(*second), State::kFailed);
}

TEST_F(OperationWatchdogTest, AnErrorOfAnIdleGroupIsSeen) {
  health_ = absl::UnavailableError("a peer is gone");
  watchdog_.Poll(At(0));
  ASSERT_EQ(stops_.size(), 1);
  EXPECT_EQ(stops_[0].report.cause, Cause::kLost);
  EXPECT_EQ(stops_[0].report.text, "a peer is gone");
  EXPECT_EQ(stops_[0].report.position, "has finished nothing yet");
  EXPECT_EQ(watchdog_.StateOf(*Launch()), State::kFailed);
}

TEST_F(OperationWatchdogTest, AnErrorOfTheDeviceIsThisRanksOwn) {
  const OperationPtr operation = Launch();
  query_error_ = absl::InternalError("illegal address");
  EXPECT_EQ(watchdog_.StateOf(*operation), State::kFailed);
  ASSERT_EQ(stops_.size(), 1);
  EXPECT_EQ(stops_[0].report.cause, Cause::kAbort);
  ASSERT_TRUE(stops_[0].status.has_value());
  EXPECT_THAT(*stops_[0].status,
              StatusIs(absl::StatusCode::kInternal, "illegal address"));
}

TEST_F(OperationWatchdogTest, TheFirstFailureWins) {
  num_done_ = 1;
  Launch();
  watchdog_.Poll(At(0));
  watchdog_.Fail(absl::AbortedError("first"));
  watchdog_.Fail(absl::AbortedError("second"));
  health_ = absl::InternalError("third");
  watchdog_.Poll(absl::InfiniteFuture());
  ASSERT_EQ(stops_.size(), 1);
  EXPECT_EQ(watchdog_.failure()->report.text, "first");
  EXPECT_EQ(watchdog_.Position(),
            "has finished all-gather #0 of blocks.2 and called nothing since");
}

TEST_F(OperationWatchdogTest, KeepsWhatADroppedOperationNeedsUntilItIsDone) {
  const auto tensor = std::make_shared<int>(7);
  const OperationPtr done = Launch();
  const OperationPtr failed = Launch();
  watchdog_.Keep(*done, tensor);
  watchdog_.Keep(*failed, tensor);
  EXPECT_EQ(tensor.use_count(), 3);
  num_done_ = 1;
  watchdog_.Poll(At(0));
  EXPECT_EQ(tensor.use_count(), 2);
  watchdog_.Keep(*done, tensor);  // too late to be needed
  EXPECT_EQ(tensor.use_count(), 2);
  watchdog_.Fail(absl::AbortedError("enough"));
  EXPECT_EQ(tensor.use_count(), 1);
}

TEST(OperationWatchdogThreadTest, SaysThatThereIsNoThread) {
  OperationWatchdog watchdog(
      {[] { return absl::OkStatus(); },
       [](const OperationWatchdog::Failure& /*why*/) {}});
  const ::fsdp::testing::NoThreads none;
  EXPECT_THAT(watchdog.Start(absl::Milliseconds(1)),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       ::testing::HasSubstr("cannot start a thread")));
}

TEST(OperationWatchdogThreadTest, ItsThreadFindsAMissedDeadline) {
  absl::Notification stopped;
  OperationWatchdog watchdog(
      {[] { return absl::OkStatus(); },
       [&](const OperationWatchdog::Failure& /*why*/) { stopped.Notify(); }});
  const OperationPtr operation =
      watchdog.Begin(GatherOf("w"), 1, absl::InfinitePast());
  ASSERT_OK(watchdog.Start(absl::Milliseconds(1)));
  EXPECT_TRUE(stopped.WaitForNotificationWithTimeout(absl::Seconds(30)));
  watchdog.Stop();
  EXPECT_EQ(watchdog.StateOf(*operation), State::kFailed);
  EXPECT_EQ(watchdog.AwaitStopped().report.cause, Cause::kDeadline);
}

// Writes down what is asked of it, and answers `status`.
struct FakeGroup {
  struct Operation {};

  absl::Status Wait(const Operation& /*operation*/, absl::Time /*deadline*/) {
    asked.push_back("wait");
    return status;
  }
  absl::Status BlockCurrentStream(const Operation& /*operation*/) {
    asked.push_back("block");
    return status;
  }
  void Keep(const Operation& /*operation*/, std::vector<at::Tensor> tensors) {
    kept = std::move(tensors);
  }

  absl::Status status;
  std::vector<std::string> asked;
  std::vector<at::Tensor> kept;
};

class StreamWorkTest : public ::testing::Test {
 protected:
  // A started operation on `tensor_`.
  std::unique_ptr<Work> Start() {
    return std::make_unique<StreamWork<FakeGroup>>(
        group_, std::make_shared<FakeGroup::Operation>(),
        std::vector<at::Tensor>{tensor_});
  }

  const std::shared_ptr<FakeGroup> group_ = std::make_shared<FakeGroup>();
  const at::Tensor tensor_ = at::zeros({4});
};

TEST_F(StreamWorkTest, HoldsItsTensorsUntilItIsWaitedFor) {
  const auto work = Start();
  EXPECT_EQ(tensor_.use_count(), 2u);
  EXPECT_OK(work->Wait(absl::InfiniteFuture()));
  EXPECT_EQ(tensor_.use_count(), 1u);
}

TEST_F(StreamWorkTest, TheFirstResultOfAWaitIsThatOfAll) {
  const auto work = Start();
  group_->status = absl::AbortedError("disk full");
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_THAT(work->Wait(absl::InfiniteFuture()),
                StatusIs(absl::StatusCode::kAborted, "disk full"));
    EXPECT_THAT(work->BlockCurrentStream(),
                StatusIs(absl::StatusCode::kAborted, "disk full"));
    group_->status = absl::OkStatus();
  }
  EXPECT_THAT(group_->asked, ElementsAre("wait"));
}

// A capture must not wait for an event of before it.
TEST_F(StreamWorkTest, NoStreamWaitsForWhatIsDone) {
  const auto work = Start();
  EXPECT_OK(work->Wait(absl::InfiniteFuture()));
  EXPECT_OK(work->BlockCurrentStream());
  EXPECT_THAT(group_->asked, ElementsAre("wait"));
}

TEST_F(StreamWorkTest, EveryStreamThatAsksWaits) {
  const auto work = Start();
  EXPECT_OK(work->BlockCurrentStream());
  EXPECT_OK(work->BlockCurrentStream());
  EXPECT_OK(work->Wait(absl::InfiniteFuture()));
  EXPECT_THAT(group_->asked, ElementsAre("block", "block", "wait"));
}

TEST_F(StreamWorkTest, WhatAStreamWaitsForIsTheCallers) {
  auto work = Start();
  EXPECT_OK(work->BlockCurrentStream());
  work.reset();
  EXPECT_THAT(group_->kept, ::testing::IsEmpty());
}

TEST_F(StreamWorkTest, WhatNobodyWaitsForTheGroupKeeps) {
  auto work = Start();
  group_->status = absl::UnavailableError("no stream");
  EXPECT_FALSE(work->BlockCurrentStream().ok());
  work.reset();
  ASSERT_EQ(group_->kept.size(), 1u);
  EXPECT_TRUE(group_->kept[0].is_same(tensor_));
}

}  // namespace
}  // namespace fsdp::comm
