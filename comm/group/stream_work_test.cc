#include <ATen/ops/zeros.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/group/watched_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;

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
