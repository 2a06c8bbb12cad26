// Tensors moved to stores that are slow, full or fail.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "base/testing/warnings.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp {
namespace {

using ::fsdp::numbered_tensors::Host;
using ::fsdp::numbered_tensors::kBytes;
using ::fsdp::numbered_tensors::MemoryOf;
using ::fsdp::numbered_tensors::MoveRegions;
using ::fsdp::numbered_tensors::Numbers;
using ::fsdp::numbered_tensors::WeakStorage;
using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::WithFaults;
using ::fsdp::testing::CheckMovesIn;
using ::fsdp::testing::Make;
using ::fsdp::testing::MoveOne;
using ::fsdp::testing::MoveOut;
using ::fsdp::testing::SmallOptions;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::StoreComesTo;
using ::fsdp::testing::Warnings;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

Fault Delayed(Fault::Operation operation, absl::Duration delay) {
  Fault fault;
  fault.operation = operation;
  fault.effect = Fault::Effect::kDelay;
  fault.delay = delay;
  fault.count = 1000;
  return fault;
}

constexpr absl::Duration kNever = absl::Hours(1000);

ActivationOffloadOptions ImpatientOptions() {
  ActivationOffloadOptions options = SmallOptions();
  options.timeout = absl::Milliseconds(1);
  return options;
}

TEST(SlowStoreTest, WhatIsStillBeingWrittenIsFoundInMemory) {
  const auto offload =
      Make(WithFaults(Host(), {Delayed(Fault::Operation::kWrite, kNever)}));
  const at::Tensor tensor = Numbers(1);
  const auto moved = MoveOne(*offload, tensor);
  ASSERT_OK_AND_ASSIGN(const auto back, moved->MoveIn());
  EXPECT_TRUE(back[0].is_alias_of(tensor));
  EXPECT_TRUE(at::equal(back[0], tensor));
  EXPECT_EQ(offload->stats().found, 1);
  EXPECT_EQ(offload->stats().bytes_in, 0);
}

TEST(SlowStoreTest, WhatIsBeingWrittenTakesNoMoreMemoryThanTheWindow) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = 2 * kBytes;
  const auto offload = Make(
      WithFaults(Host(),
                 {Delayed(Fault::Operation::kWrite, absl::Milliseconds(3))}),
      options);
  std::vector<WeakStorage> memory;
  std::vector<std::unique_ptr<MovedArguments>> regions;
  for (int i = 0; i < 9; ++i) {
    at::Tensor tensor = Numbers(i);
    memory.push_back(MemoryOf(tensor));
    regions.push_back(MoveOne(*offload, std::move(tensor)));
    EXPECT_LE(std::count_if(memory.begin(), memory.end(),
                            [](const auto& weak) { return !weak.expired(); }),
              2);
  }
  for (int i = 8; i >= 0; --i) {
    EXPECT_OK(CheckMovesIn(*regions[i], Numbers(i)));
  }
  EXPECT_EQ(offload->stats().failed, 0);
}

TEST(SlowStoreTest, WhatIsNextStaysInMemoryOnceItIsWritten) {
  const auto offload = Make(WithFaults(
      Host(), {Delayed(Fault::Operation::kWrite, absl::Milliseconds(500))}));
  const auto regions = MoveRegions(*offload, 2);
  EXPECT_OK(CheckMovesIn(*regions[1], Numbers(1)));
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (offload->stats().tensors_out < 2) {
    ASSERT_LT(absl::Now(), deadline);
  }
  EXPECT_OK(CheckMovesIn(*regions[0], Numbers(0)));
  EXPECT_EQ(offload->stats().bytes_in, 0);
}

TEST(SlowStoreTest, WhatNobodyNeedsAnyMoreIsErasedOnceItIsOver) {
  for (const auto operation :
       {Fault::Operation::kWrite, Fault::Operation::kRead}) {
    const auto offload =
        Make(WithFaults(Host(), {Delayed(operation, absl::Milliseconds(20))}));
    auto regions = MoveRegions(*offload, 3);
    if (operation == Fault::Operation::kRead) {
      EXPECT_OK(CheckMovesIn(*regions[2], Numbers(2)));
    }
    const int64_t one = offload::StoredBytes(kBytes);
    EXPECT_EQ(offload->stats().stored_bytes, 3 * one);
    regions.clear();
    EXPECT_TRUE(StoreComesTo(*offload, 0));
    EXPECT_EQ(offload->stats().failed, 0);
  }
}

TEST(SlowStoreTest, ATensorStaysWhereTheOnesBeforeItAreNeverWritten) {
  ActivationOffloadOptions options = ImpatientOptions();
  options.window_bytes = kBytes;
  const auto offload = Make(
      WithFaults(Host(), {Delayed(Fault::Operation::kWrite, kNever)}), options);
  const auto moved = MoveOne(*offload, Numbers(1));
  for (int i = 1; i <= 3; ++i) {
    std::vector<at::Tensor> tensors = {Numbers(2)};
    EXPECT_EQ(MoveOut(*offload, tensors), nullptr);
    EXPECT_TRUE(at::equal(tensors[0], Numbers(2)));
    EXPECT_EQ(offload->stats().failed, i);
  }
  EXPECT_OK(CheckMovesIn(*moved, Numbers(1)));
}

TEST(SlowStoreTest, AReadThatTakesTooLongIsAnErrorAndNotStartedAgain) {
  const auto offload =
      Make(WithFaults(Host(), {Delayed(Fault::Operation::kRead, kNever)}),
           ImpatientOptions());
  const auto moved = MoveOne(*offload, Numbers(1));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(
        moved->MoveIn(),
        StatusIs(Code::kDeadlineExceeded,
                 HasSubstr("move tensor 0 in the arguments of a region")));
    EXPECT_EQ(offload->store().Stats().reads.operations, 1);
  }
}

TEST(SlowStoreTest, AReadThatTakesTooLongCanBeWaitedForAgain) {
  const auto offload = Make(
      WithFaults(Host(),
                 {Delayed(Fault::Operation::kRead, absl::Milliseconds(20))}),
      ImpatientOptions());
  const auto moved = MoveOne(*offload, Numbers(1));
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  absl::Status status;
  do {
    status = CheckMovesIn(*moved, Numbers(1));
  } while (absl::IsDeadlineExceeded(status) && absl::Now() < deadline);
  EXPECT_OK(status);
}

TEST(FullStoreTest, WhatHasNoRoomStaysInMemory) {
  const auto offload = Make(Host(/*tensors=*/2));
  auto regions = MoveRegions(*offload, 2);
  std::vector<at::Tensor> tensors = {Numbers(5)};
  EXPECT_EQ(MoveOut(*offload, tensors), nullptr);
  EXPECT_TRUE(at::equal(tensors[0], Numbers(5)));
  EXPECT_EQ(offload->stats().full, 1);
  EXPECT_EQ(offload->stats().failed, 0);
  regions.pop_back();
  EXPECT_NE(MoveOut(*offload, tensors), nullptr);
  EXPECT_EQ(offload->stats().full, 1);
}

class FailingStoreTest : public ::testing::TestWithParam<Fault::Effect> {};

TEST_P(FailingStoreTest, WhatCannotBeWrittenStaysInMemory) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (int nth = 0; nth < 3; ++nth) {
    const auto offload = Make(WithFaults(
        Host(), {FaultOf(Fault::Operation::kWrite, GetParam(), nth)}));
    std::vector<at::Tensor> tensors = {Numbers(0), Numbers(1), Numbers(2)};
    auto moved = MoveOut(*offload, tensors);
    ASSERT_OK_AND_ASSIGN(const auto back, moved->MoveIn());
    for (int i = 0; i < 3; ++i) {
      EXPECT_NE(tensors[i].defined(), back[i].defined());
      const at::Tensor& there = back[i].defined() ? back[i] : tensors[i];
      EXPECT_TRUE(at::equal(there, Numbers(i))) << i;
    }
    EXPECT_EQ(offload->stats().failed, 1);
    EXPECT_EQ(offload->stats().stored_bytes, 2 * offload::StoredBytes(kBytes));
    moved.reset();
    EXPECT_EQ(offload->stats().stored_bytes, 0);
  }
  ASSERT_EQ(warnings.texts.size(), 3u);
  for (int nth = 0; nth < 3; ++nth) {
    EXPECT_THAT(
        warnings.texts[nth],
        AllOf(HasSubstr("stays in memory"), HasSubstr("injected failure"),
              HasSubstr(absl::StrCat("write region 'activation ", nth,
                                     " of a region', offset 0, ", kBytes,
                                     " bytes"))));
  }
}

TEST_P(FailingStoreTest, OnlyTheFirstFailureIsReported) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const auto offload = Make(WithFaults(
      Host(), {FaultOf(Fault::Operation::kWrite, GetParam(), 0, 1000)}));
  for (int i = 0; i < 4; ++i) {
    std::vector<at::Tensor> tensors = {Numbers(i)};
    const auto moved = MoveOut(*offload, tensors);
    if (moved == nullptr) continue;
    EXPECT_OK(CheckMovesIn(*moved, Numbers(i)));
  }
  EXPECT_EQ(offload->stats().failed, 4);
  EXPECT_EQ(warnings.texts.size(), 1u);
}

TEST_P(FailingStoreTest, WhatCannotBeReadIsAnErrorAndCanBeReadAgain) {
  const auto offload = Make(
      WithFaults(Host(), {FaultOf(Fault::Operation::kRead, GetParam(), 0)}));
  const auto moved = MoveOne(*offload, Numbers(1));
  EXPECT_THAT(
      moved->MoveIn(),
      StatusIs(Code::kUnavailable,
               AllOf(HasSubstr("move tensor 0 in the arguments of a region, "
                               "Float [64] on cpu, back into memory: "),
                     HasSubstr("read region 'activation 0 of a region', "
                               "offset 0, 256 bytes"),
                     HasSubstr("injected failure"))));
  EXPECT_OK(CheckMovesIn(*moved, Numbers(1)));
}

TEST_P(FailingStoreTest, WhatCannotBeReadAheadIsReadOnceMore) {
  for (int64_t count : {1, 2}) {
    const auto offload = Make(WithFaults(
        Host(), {FaultOf(Fault::Operation::kRead, GetParam(), 1, count)}));
    const auto regions = MoveRegions(*offload, 2);
    EXPECT_OK(CheckMovesIn(*regions[1], Numbers(1)));
    if (count == 2) {
      EXPECT_THAT(regions[0]->MoveIn(),
                  StatusIs(Code::kUnavailable, HasSubstr("injected failure")));
    }
    EXPECT_OK(CheckMovesIn(*regions[0], Numbers(0)));
  }
}

INSTANTIATE_TEST_SUITE_P(Effects, FailingStoreTest,
                         ::testing::Values(Fault::Effect::kRefuse,
                                           Fault::Effect::kFail,
                                           Fault::Effect::kShorten));

}  // namespace
}  // namespace fsdp
