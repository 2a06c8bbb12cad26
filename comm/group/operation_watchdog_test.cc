#include "comm/group/operation_watchdog.h"

#include <ATen/ops/zeros.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using State = WatchedGroup::State;
using OperationPtr = std::shared_ptr<WatchedGroup::Operation>;

constexpr absl::Duration kTimeout = absl::Hours(1);

// A group of one rank, on a device whose first `num_done_` operations are done.
class WatchedGroupTest : public ::testing::Test {
 protected:
  OperationPtr Begin() {
    Call call{Collective::kAllGather, "blocks.2", "bfloat16", 1024, ""};
    return group_->Begin(std::move(call), 2048).value();
  }

  OperationPtr Launch() {
    const int number = num_launched_++;
    OperationPtr operation = Begin();
    group_->Launched(*operation, [this, number]() -> absl::StatusOr<bool> {
      if (!query_error_.ok()) return query_error_;
      return number < num_done_;
    });
    return operation;
  }

  // Returns what the peers are told.
  RankReport Reported() {
    store_->wait({"report/0"});
    return Decode(store_->get_to_str("report/0")).value();
  }

  std::unique_ptr<WatchedGroup> Make(absl::Duration timeout) {
    WatchedGroup::Options options;
    options.timeout = timeout;
    return std::make_unique<WatchedGroup>(
        ReportExchange::Create(store_, /*rank=*/0, /*world_size=*/1).value(),
        options,
        WatchedGroup::Hooks{[this] { return health_; },
                            [this] { ++num_stops_; }});
  }

  int num_launched_ = 0;
  int num_done_ = 0;
  absl::Status query_error_;
  absl::Status health_;
  std::atomic<int> num_stops_{0};
  const c10::intrusive_ptr<c10d::Store> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::unique_ptr<WatchedGroup> group_ = Make(kTimeout);
};

TEST_F(WatchedGroupTest, OperationsAreDoneWhenTheDeviceSaysSo) {
  const OperationPtr first = Launch();
  const OperationPtr second = Launch();
  EXPECT_EQ(group_->StateOf(*first), State::kRunning);
  num_done_ = 1;
  EXPECT_EQ(group_->StateOf(*second), State::kRunning);
  EXPECT_EQ(group_->StateOf(*first), State::kDone);
  EXPECT_FALSE(group_->idle());
  num_done_ = 2;
  group_->Poll(absl::Now());
  EXPECT_TRUE(group_->idle());
  EXPECT_EQ(group_->StateOf(*second), State::kDone);
  EXPECT_EQ(num_stops_, 0);
}

TEST_F(WatchedGroupTest, WhatIsNotLaunchedYetRuns) {
  const absl::Time before = absl::Now();
  const OperationPtr operation = Begin();
  group_->Poll(before + kTimeout);
  EXPECT_EQ(group_->StateOf(*operation), State::kRunning);
  group_->Poll(absl::Now() + kTimeout);
  EXPECT_EQ(group_->StateOf(*operation), State::kFailed);
}

TEST_F(WatchedGroupTest, TheOldestOperationsDeadlineEndsTheGroup) {
  const OperationPtr first = Launch();
  const absl::Time between = absl::Now();
  const OperationPtr second = Launch();
  EXPECT_EQ(group_->Describe(*second),
            "all-gather #1 of blocks.2 on rank 0 of 1 (bfloat16 x 1024, 2048 "
            "bytes)");
  const OperationPtr third = Launch();
  num_done_ = 1;
  group_->Poll(between + kTimeout);  // the first is late, but done
  EXPECT_FALSE(group_->failed());
  group_->Poll(absl::Now() + kTimeout);
  EXPECT_EQ(num_stops_, 1);
  EXPECT_EQ(Reported().cause, Cause::kDeadline);
  EXPECT_EQ(Reported().text, "not done at the deadline");
  EXPECT_EQ(Reported().position, "is in all-gather #1 of blocks.2");
  EXPECT_EQ(group_->StateOf(*first), State::kDone);
  EXPECT_OK(group_->Check(*first));
  for (const OperationPtr& late : {second, third}) {
    EXPECT_EQ(group_->StateOf(*late), State::kFailed);
    EXPECT_THAT(group_->Check(*late),
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         HasSubstr("not done at the deadline")));
  }
}

TEST_F(WatchedGroupTest, WhatWasDoneBeforeTheFailureStaysDone) {
  const OperationPtr first = Launch();
  const OperationPtr second = Launch();
  num_done_ = 1;  // nobody has asked yet
  group_->Fail(absl::AbortedError("enough"));
  num_done_ = 2;  // an abort ends the kernels, and events say done
  EXPECT_EQ(group_->StateOf(*first), State::kDone);
  EXPECT_EQ(group_->StateOf(*second), State::kFailed);
}

TEST_F(WatchedGroupTest, AnErrorOfAnIdleGroupIsSeen) {
  health_ = absl::UnavailableError("a peer is gone");
  group_->Poll(absl::Now());
  EXPECT_EQ(num_stops_, 1);
  EXPECT_EQ(Reported().cause, Cause::kLost);
  EXPECT_EQ(Reported().text, "a peer is gone");
  EXPECT_EQ(Reported().position, "has finished nothing yet");
  EXPECT_THAT(group_->Begin(Call(), 1), StatusIs(absl::StatusCode::kUnavailable,
                                                 HasSubstr("a peer is gone")));
}

TEST_F(WatchedGroupTest, AnErrorOfTheDeviceIsThisRanksOwn) {
  const OperationPtr operation = Launch();
  query_error_ = absl::InternalError("illegal address");
  EXPECT_EQ(group_->StateOf(*operation), State::kFailed);
  EXPECT_EQ(num_stops_, 1);
  EXPECT_EQ(Reported().cause, Cause::kAbort);
  EXPECT_THAT(group_->Check(*operation),
              StatusIs(absl::StatusCode::kInternal,
                       ::testing::EndsWith("bytes): illegal address")));
}

TEST_F(WatchedGroupTest, TheFirstFailureWins) {
  num_done_ = 1;
  Launch();
  group_->Poll(absl::Now());
  group_->Fail(absl::AbortedError("first"));
  group_->Fail(absl::AbortedError("second"));
  health_ = absl::InternalError("third");
  group_->Poll(absl::InfiniteFuture());
  EXPECT_EQ(num_stops_, 1);
  EXPECT_EQ(Reported().text, "first");
  EXPECT_EQ(Reported().position,
            "has finished all-gather #0 of blocks.2 and called nothing since");
}

TEST_F(WatchedGroupTest, KeepsWhatADroppedOperationNeedsUntilItIsDone) {
  const auto tensor = std::make_shared<int>(7);
  const OperationPtr done = Launch();
  const OperationPtr failed = Launch();
  group_->Keep(*done, tensor);
  group_->Keep(*failed, tensor);
  EXPECT_EQ(tensor.use_count(), 3);
  num_done_ = 1;
  group_->Poll(absl::Now());
  EXPECT_EQ(tensor.use_count(), 2);
  group_->Keep(*done, tensor);  // too late to be needed
  EXPECT_EQ(tensor.use_count(), 2);
  group_->Fail(absl::AbortedError("enough"));
  EXPECT_EQ(tensor.use_count(), 1);
}

TEST_F(WatchedGroupTest, SaysThatThereIsNoThread) {
  const ::fsdp::testing::NoThreads none;
  EXPECT_THAT(group_->Start(), StatusIs(absl::StatusCode::kResourceExhausted,
                                        HasSubstr("cannot start a thread")));
}

TEST_F(WatchedGroupTest, ItsThreadFindsAMissedDeadline) {
  group_ = Make(absl::ZeroDuration());
  ASSERT_OK(group_->Start());
  const OperationPtr operation = Launch();
  EXPECT_EQ(Reported().cause, Cause::kDeadline);
  EXPECT_EQ(group_->StateOf(*operation), State::kFailed);
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
  const std::shared_ptr<FakeGroup> group_ = std::make_shared<FakeGroup>();
  const at::Tensor tensor_ = at::zeros({4});
  std::optional<StreamWork<FakeGroup>> work_{
      std::in_place, group_, std::make_shared<FakeGroup::Operation>(),
      std::vector<at::Tensor>{tensor_}};
};

TEST_F(StreamWorkTest, TheFirstResultOfAWaitIsThatOfAll) {
  group_->status = absl::AbortedError("disk full");
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_THAT(work_->Wait(absl::InfiniteFuture()),
                StatusIs(absl::StatusCode::kAborted, "disk full"));
    EXPECT_THAT(work_->BlockCurrentStream(),
                StatusIs(absl::StatusCode::kAborted, "disk full"));
    group_->status = absl::OkStatus();
  }
  EXPECT_THAT(group_->asked, ElementsAre("wait"));
}

TEST_F(StreamWorkTest, EveryStreamThatAsksWaitsUntilItIsDone) {
  EXPECT_OK(work_->BlockCurrentStream());
  EXPECT_OK(work_->BlockCurrentStream());
  EXPECT_EQ(tensor_.use_count(), 2u);
  EXPECT_OK(work_->Wait(absl::InfiniteFuture()));
  EXPECT_EQ(tensor_.use_count(), 1u);
  // A capture must not wait for an event of before it.
  EXPECT_OK(work_->BlockCurrentStream());
  EXPECT_THAT(group_->asked, ElementsAre("block", "block", "wait"));
}

TEST_F(StreamWorkTest, TheGroupKeepsWhatNoStreamWaitsFor) {
  for (const bool waits : {true, false}) {
    if (!waits) group_->status = absl::UnavailableError("no stream");
    StreamWork<FakeGroup>(group_, std::make_shared<FakeGroup::Operation>(),
                          {tensor_})
        .BlockCurrentStream()
        .IgnoreError();
    EXPECT_EQ(group_->kept.empty(), waits);
  }
}

}  // namespace
}  // namespace fsdp::comm
