// Offloads tensors without a graph. For regions see checkpoint_offload_test.cc.
#include "fsdp/recompute/activation_offload.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <thread>

#include "base/testing/warnings.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/host_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::TemporaryFile;
using ::fsdp::offload::testing::WithFaults;

constexpr int64_t kElements = 64;
constexpr int64_t kBytes = kElements * sizeof(float);

// Returns a tensor that counts from `first`.
at::Tensor Numbers(int64_t first, int64_t elements = kElements) {
  return at::arange(first, first + elements, at::kFloat);
}

// Returns a store with room for `tensors` tensors of kBytes.
std::unique_ptr<offload::ParamStore> Host(int64_t tensors = 64) {
  return offload::HostStore::Make(tensors * offload::StoredBytes(kBytes))
      .value();
}

// Moves out regions 0, 1, ... with one tensor each.
std::vector<std::unique_ptr<MovedArguments>> MoveRegions(
    ActivationOffload& offload, int count) {
  std::vector<std::unique_ptr<MovedArguments>> regions;
  regions.reserve(count);
  for (int i = 0; i < count; ++i) {
    regions.push_back(MoveOne(offload, Numbers(i)));
  }
  return regions;
}

TEST(ActivationOffloadTest, MemoryGoesAndComesBackWithTheSameBits) {
  const auto offload = Make(Host());
  std::vector<at::Tensor> tensors = {Numbers(1), Numbers(2)};
  const WeakStorage first = MemoryOf(tensors[0]);
  const WeakStorage second = MemoryOf(tensors[1]);
  auto moved = MoveOut(*offload, tensors);
  ASSERT_NE(moved, nullptr);
  EXPECT_FALSE(tensors[0].defined());
  EXPECT_FALSE(tensors[1].defined());
  EXPECT_TRUE(first.expired());
  EXPECT_TRUE(second.expired());
  EXPECT_EQ(offload->stats().bytes_out, 2 * kBytes);
  EXPECT_EQ(offload->stats().stored_bytes, 2 * offload::StoredBytes(kBytes));
  for (int round = 1; round <= 2; ++round) {
    ASSERT_OK_AND_ASSIGN(const std::vector<at::Tensor> back, moved->MoveIn());
    ASSERT_EQ(back.size(), 2u);
    EXPECT_TRUE(at::equal(back[0], Numbers(1)));
    EXPECT_TRUE(at::equal(back[1], Numbers(2)));
    EXPECT_EQ(offload->stats().bytes_in, int64_t{2} * round * kBytes);
  }
  moved.reset();
  EXPECT_EQ(offload->stats().stored_bytes, 0);
  EXPECT_EQ(offload->stats().peak_stored_bytes,
            2 * offload::StoredBytes(kBytes));
}

TEST(ActivationOffloadTest, WhatIsSmallOrNotPlainNumbersStays) {
  ActivationOffloadOptions options = SmallOptions();
  options.min_bytes = kBytes;
  const auto offload = Make(Host(), options);
  flat_param::GuardedStorage guarded(kBytes, c10::Device(c10::kCPU), "freed");
  float memory[kElements] = {};
  guarded.Fill(memory);
  const std::vector<at::Tensor> staying = {
      at::Tensor(),
      Numbers(1, kElements - 1),
      Numbers(1, 1).expand({kElements}),
      at::empty({0, 3}),
      Numbers(1).to(at::kLong),
      Numbers(1).to_sparse(),
      at::empty({0}).set_(guarded.storage(), 0, {kElements}, {1})};
  std::vector<at::Tensor> tensors = staying;
  EXPECT_EQ(MoveOut(*offload, tensors), nullptr);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(tensors[i].is_same(staying[i])) << i;
  }
  tensors.push_back(Numbers(5));
  const auto moved = MoveOut(*offload, tensors);
  ASSERT_OK_AND_ASSIGN(const auto back, moved->MoveIn());
  for (size_t i = 0; i < staying.size(); ++i) {
    EXPECT_TRUE(tensors[i].is_same(staying[i])) << i;
    EXPECT_FALSE(back[i].defined()) << i;
  }
  EXPECT_TRUE(at::equal(back.back(), Numbers(5)));
}

TEST(ActivationOffloadTest, ATensorThatIsThereTwiceIsWrittenOnce) {
  const auto offload = Make(Host());
  const at::Tensor tensor = Numbers(1);
  std::vector<at::Tensor> tensors = {tensor, tensor.detach(), tensor};
  const auto moved = MoveOut(*offload, tensors);
  EXPECT_EQ(offload->stats().tensors_out, 1);
  ASSERT_OK_AND_ASSIGN(const auto back, moved->MoveIn());
  for (const at::Tensor& same : back) {
    EXPECT_TRUE(at::equal(same, tensor));
    EXPECT_TRUE(same.is_alias_of(back[0]));
  }
  EXPECT_EQ(offload->stats().missed, 1);
}

TEST(ActivationOffloadTest, ATensorOfTwoOwnersIsThereUntilBothAreGone) {
  const auto offload = Make(Host());
  const at::Tensor tensor = Numbers(1);
  auto first = MoveOne(*offload, tensor);
  auto second = MoveOne(*offload, tensor);
  EXPECT_EQ(offload->stats().tensors_out, 1);
  first.reset();
  EXPECT_OK(CheckMovesIn(*second, tensor));
  second.reset();
  EXPECT_EQ(offload->stats().stored_bytes, 0);
  // Nothing of it is left for a later owner to find.
  const auto third = MoveOne(*offload, tensor);
  EXPECT_OK(CheckMovesIn(*third, tensor));
  EXPECT_EQ(offload->stats().tensors_out, 2);
}

TEST(ActivationOffloadTest, OtherElementsOrShapesOfOneStorageAreOtherTensors) {
  const auto offload = Make(Host());
  const at::Tensor whole = Numbers(1).view({2, kElements / 2});
  std::vector<at::Tensor> tensors = {whole, whole[0], whole[1], whole.view(-1),
                                     whole.narrow(1, 0, 16)};
  const auto moved = MoveOut(*offload, tensors);
  ASSERT_OK_AND_ASSIGN(const auto back, moved->MoveIn());
  EXPECT_TRUE(at::equal(back[0], whole));
  EXPECT_TRUE(at::equal(back[1], whole[0]));
  EXPECT_TRUE(at::equal(back[2], whole[1]));
  EXPECT_TRUE(at::equal(back[3], whole.view(-1)));
  EXPECT_TRUE(at::equal(back[4], whole.narrow(1, 0, 16)));
}

TEST(ActivationOffloadTest, ATensorThatWasModifiedIsWrittenAgain) {
  const auto offload = Make(Host());
  const at::Tensor tensor = Numbers(1);
  const auto before = MoveOne(*offload, tensor);
  tensor.mul_(2);
  const auto after = MoveOne(*offload, tensor);
  EXPECT_OK(CheckMovesIn(*before, Numbers(1)));
  EXPECT_OK(CheckMovesIn(*after, Numbers(1).mul(2)));
}

TEST(ActivationOffloadTest, RefusesOptionsBelowZero) {
  const auto make = [](auto change) {
    ActivationOffloadOptions options;
    change(options);
    // Memory of the store's own is given back before who gave it.
    EXPECT_EQ(ActivationOffload::MakeInHostMemory(1 << 16, at::kCPU, options)
                  .status()
                  .code(),
              Code::kInvalidArgument);
    return ActivationOffload::Make(Host(), options).status();
  };
  using Options = ActivationOffloadOptions;
  EXPECT_THAT(make([](Options& options) { options.min_bytes = -1; }),
              StatusIs(Code::kInvalidArgument, HasSubstr("min_bytes -1")));
  EXPECT_THAT(make([](Options& options) { options.window_bytes = -1; }),
              StatusIs(Code::kInvalidArgument, HasSubstr("window_bytes -1")));
  EXPECT_THAT(make([](Options& options) { options.regions_ahead = -1; }),
              StatusIs(Code::kInvalidArgument, HasSubstr("regions_ahead -1")));
  EXPECT_THAT(make([](Options& options) { options.timeout = {}; }),
              StatusIs(Code::kInvalidArgument, HasSubstr("timeout 0")));
}

class RegionsAheadTest : public ::testing::TestWithParam<int> {};

TEST_P(RegionsAheadTest, AreReadBeforeBackwardNeedsThem) {
  ActivationOffloadOptions options = SmallOptions();
  options.regions_ahead = GetParam();
  const auto offload = Make(Host(), options);
  auto regions = MoveRegions(*offload, 6);
  for (int pass = 0; pass < 2; ++pass) {  // the second with retain_graph
    for (int i = 5; i >= 0; --i) {
      EXPECT_OK(CheckMovesIn(*regions[i], Numbers(i)));
      const int64_t read = 6 * pass + std::min(6, 6 - i + GetParam());
      EXPECT_EQ(offload->stats().bytes_in, read * kBytes) << pass << ", " << i;
      if (pass == 1) regions[i].reset();  // as backward does at the end
    }
  }
  EXPECT_EQ(offload->stats().missed, 2 * (GetParam() == 0 ? 6 : 1));
  EXPECT_EQ(offload->stats().prefetched, 2 * (GetParam() == 0 ? 0 : 5));
}

INSTANTIATE_TEST_SUITE_P(Counts, RegionsAheadTest,
                         ::testing::Values(0, 1, 2, 3));

TEST(ReadAheadTest, AnInnerRegionReadsNotWhatTheOuterOneHasReadAlready) {
  const auto offload = Make(Host());
  const auto outer = MoveRegions(*offload, 2);
  EXPECT_OK(CheckMovesIn(*outer[1], Numbers(1)));  // reads outer[0] ahead
  const int64_t read = offload->stats().bytes_in;
  const auto inner = MoveOne(*offload, Numbers(7));
  EXPECT_OK(CheckMovesIn(*inner, Numbers(7)));
  EXPECT_EQ(offload->stats().bytes_in, read + kBytes);
  EXPECT_OK(CheckMovesIn(*outer[0], Numbers(0)));
  EXPECT_EQ(offload->stats().bytes_in, read + kBytes);
}

TEST(ReadAheadTest, ATensorOfTwoRegionsIsReadOnceWhereTheyFollow) {
  const auto offload = Make(Host());
  const at::Tensor shared = Numbers(9);
  std::vector<std::unique_ptr<MovedArguments>> regions;
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> tensors = {Numbers(i), shared};
    regions.push_back(MoveOut(*offload, tensors));
  }
  for (int i = 2; i >= 0; --i) {
    ASSERT_OK_AND_ASSIGN(const auto back, regions[i]->MoveIn());
    EXPECT_TRUE(at::equal(back[0], Numbers(i)));
    EXPECT_TRUE(at::equal(back[1], shared));
  }
  EXPECT_EQ(offload->stats().bytes_in, 4 * kBytes);
}

TEST(ReadAheadTest, IsLimitedByTheWindowAndGivesWayToWhatIsNext) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  options.regions_ahead = 2;
  const auto offload = Make(Host(), options);
  const auto regions = MoveRegions(*offload, 6);
  EXPECT_OK(CheckMovesIn(*regions[5], Numbers(5)));
  EXPECT_EQ(offload->stats().bytes_in, 2 * kBytes);
  // The order changes, so what was read ahead is of no use.
  EXPECT_OK(CheckMovesIn(*regions[2], Numbers(2)));
  EXPECT_EQ(offload->stats().bytes_in, 4 * kBytes);
  EXPECT_OK(CheckMovesIn(*regions[1], Numbers(1)));
  EXPECT_EQ(offload->stats().prefetched, 1);
  EXPECT_OK(CheckMovesIn(*regions[4], Numbers(4)));
  EXPECT_EQ(offload->stats().missed, 3);
}

TEST(ReadAheadTest, IsNotForTensorsThatAreLargerThanTheWindow) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes - 1;
  const auto offload = Make(Host(), options);
  const auto regions = MoveRegions(*offload, 3);
  for (int i = 2; i >= 0; --i) {
    EXPECT_OK(CheckMovesIn(*regions[i], Numbers(i)));
  }
  EXPECT_EQ(offload->stats().tensors_out, 3);
  EXPECT_EQ(offload->stats().missed, 3);
}

// Each thread has its own regions' tensors, and all share one.
TEST(ThreadsTest, UseOneOffloadAtTheSameTime) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = 8192;
  const auto offload = Make(TemporaryFile(1 << 20), options);
  const at::Tensor shared = Numbers(1, 1021);
  std::vector<absl::Status> results(3);
  std::vector<std::thread> threads;
  threads.reserve(3);
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int step = 0; step < 5; ++step) {
        std::vector<std::unique_ptr<MovedArguments>> regions;
        for (int i = 0; i < 4; ++i) {
          std::vector<at::Tensor> tensors = {Numbers(100 * t + i, 613), shared};
          regions.push_back(MoveOut(*offload, tensors));
        }
        for (int i = 3; i >= step % 2; --i) {
          const auto back = regions[i]->MoveIn();
          results[t].Update(back.status());
          if (!back.ok()) return;
          results[t].Update(
              CheckTensor((*back)[0], Numbers(100 * t + i, 613), "own tensor"));
          results[t].Update(CheckTensor((*back)[1], shared, "shared tensor"));
          regions.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) EXPECT_OK(result);
  EXPECT_TRUE(StoreComesTo(*offload, 0));
}

TEST(ThreadsTest, RegionsMayOutliveWhoeverHasMadeTheOffload) {
  std::unique_ptr<MovedArguments> moved =
      MoveOne(*Make(TemporaryFile(1 << 20)), Numbers(1));
  std::thread([&] {
    EXPECT_OK(CheckMovesIn(*moved, Numbers(1)));
    moved.reset();
  }).join();
}

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
}  // namespace fsdp::testing
