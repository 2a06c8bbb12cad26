// Tests going back to the last flush after the disk has failed.
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/system_calls.h"
#include "offload/testing/faulty_system.h"
#include "offload/testing/kept_file.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;

using ::testing::HasSubstr;

using Effect = DiskFault::Effect;
using Kind = IoRequest::Kind;
using Queue = FileStoreOptions::Queue;

constexpr int64_t kBlock = 8192;
constexpr int64_t kSize = 5 * kBlock + 1021;

// Returns the region after a step of training: it is written twice, in part the
// second time, and then flushed.
std::string AfterStep(int64_t step) {
  if (step == 0) return std::string(kSize, '\0');
  std::string bytes = Pattern(step, kSize);
  bytes.replace(kBlock - 3, 11, absl::StrCat("across ", step, "..."));
  return bytes;
}

absl::Status WriteStep(FileStore& store, int64_t step) {
  FSDP_RETURN_IF_ERROR(WriteNow(store, "region", 0, Pattern(step, kSize)));
  return WriteNow(store, "region", kBlock - 3,
                  AfterStep(step).substr(kBlock - 3, 11));
}

absl::Status RunStep(FileStore& store, int64_t step) {
  FSDP_RETURN_IF_ERROR(WriteStep(store, step));
  return Finish(store.Flush());
}

// The queue, whether the file is kept, and whether it has checksums.
using Case = std::tuple<Queue, bool, bool>;

class RollbackFaultsTest : public ::testing::TestWithParam<Case>,
                           protected KeptFile {
 protected:
  RollbackFaultsTest()
      : KeptFile("rollback_faults_test", 1 << 17, kBlock,
                 std::get<0>(GetParam())) {
    options_.system = &system_;
    options_.keep = std::get<1>(GetParam());
    options_.rollback = !options_.keep;
    options_.checksums = std::get<2>(GetParam());
  }

  // Makes a store and runs `steps` good steps.
  std::unique_ptr<FileStore> MakeAfter(int64_t steps) {
    std::filesystem::remove(Path());
    system_.Release();
    std::unique_ptr<FileStore> store = Make();
    EXPECT_OK(store->Create("region", kSize));
    for (int64_t step = 1; step <= steps; ++step) {
      EXPECT_OK(RunStep(*store, step));
    }
    return store;
  }

  // Returns how many requests of the kind a step has.
  int64_t Requests(Kind kind, int64_t step) {
    const auto store = MakeAfter(step - 1);
    system_.Inject({kind, std::numeric_limits<int64_t>::max(), 0});
    EXPECT_OK(RunStep(*store, step));
    return system_.seen();
  }

  FaultySystem system_;
};

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  const auto [queue, keep, checksums] = info.param;
  return absl::StrCat(queue == Queue::kIoUring ? "uring" : "threads",
                      keep ? "_kept" : "_scratch",
                      checksums ? "" : "_without_checksums");
}

INSTANTIATE_TEST_SUITE_P(
    Stores, RollbackFaultsTest,
    ::testing::Combine(::testing::Values(Queue::kIoUring, Queue::kThreads),
                       ::testing::Bool(), ::testing::Bool()),
    CaseName);

TEST_P(RollbackFaultsTest, EachRequestFailingInTurnIsUndone) {
  struct Failure {
    Kind kind;
    Effect effect;
    int error;
  };
  for (const Failure& failure : {Failure{Kind::kWrite, Effect::kError, ENOSPC},
                                 Failure{Kind::kWrite, Effect::kShort, 0},
                                 Failure{Kind::kRead, Effect::kError, EIO},
                                 Failure{Kind::kRead, Effect::kShort, 0}}) {
    for (const int64_t good : {0, 1, 2}) {
      const int64_t requests = Requests(failure.kind, good + 1);
      ASSERT_GT(requests, 0);
      for (int64_t nth = 0; nth < requests; ++nth) {
        const auto store = MakeAfter(good);
        system_.Inject({failure.kind, nth, 1, failure.effect, failure.error});
        ASSERT_FALSE(RunStep(*store, good + 1).ok()) << nth;
        ASSERT_OK(store->Rollback());
        ASSERT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(good))
            << nth << " of " << requests << " after " << good;
        // The next step finds nothing of the one that failed.
        ASSERT_OK(RunStep(*store, good + 1));
        ASSERT_OK(WriteStep(*store, 9));
        ASSERT_OK(store->Rollback());
        ASSERT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(good + 1));
      }
    }
  }
}

TEST_P(RollbackFaultsTest, AFlushThatFailedIsNotWhatItGoesBackTo) {
  const auto store = MakeAfter(1);
  system_.Inject({Kind::kWrite, 0, 1, Effect::kError, EIO});
  EXPECT_FALSE(WriteNow(*store, "region", 0, Pattern(2, kBlock)).ok());
  system_.Release();
  ASSERT_OK(WriteNow(*store, "region", kBlock, Pattern(2, kBlock)));
  EXPECT_FALSE(Finish(store->Flush()).ok());
  ASSERT_OK(store->Rollback());
  EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(1));
  EXPECT_OK(Finish(store->Flush()));
}

TEST_P(RollbackFaultsTest, IsRefusedWhileTransfersAreUnderWay) {
  const auto store = MakeAfter(1);
  const std::string bytes = Pattern(2, kSize);
  system_.Inject({Kind::kWrite, 3, 1, Effect::kHeld, 0});
  ASSERT_OK_AND_ASSIGN(const auto write, store->Write("region", 0, bytes));
  const auto refused = StatusIs(
      absl::StatusCode::kFailedPrecondition,
      AllOf(HasSubstr("roll back"), HasSubstr("transfers are under way")));
  EXPECT_THAT(store->Rollback(), refused);
  ASSERT_OK_AND_ASSIGN(const auto flush, store->Flush());
  EXPECT_THAT(store->Rollback(), refused);
  system_.Release();
  ASSERT_OK(write->Wait(absl::Now() + absl::Seconds(60)));
  ASSERT_OK(flush->Wait(absl::Now() + absl::Seconds(60)));
  ASSERT_OK(WriteStep(*store, 3));
  ASSERT_OK(store->Rollback());
  EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), bytes);
}

// A disk that lies is found out by checksums, before a rollback and after it.
TEST_P(RollbackFaultsTest, FindsWhatTheDiskHasLost) {
  const auto store = MakeAfter(1);
  system_.Inject({Kind::kWrite, 2, 1, Effect::kLost, 0});
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(2, kSize)));
  ASSERT_OK(store->Rollback());
  EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(1));
  system_.Inject({Kind::kWrite, 2, 1, Effect::kLost, 0});
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, kSize)));
  system_.Release();
  const auto found = ReadNow(*store, "region", 0, kSize);
  if (options_.checksums) {
    EXPECT_THAT(found, StatusIs(absl::StatusCode::kDataLoss,
                                HasSubstr("'region', block 2")));
  } else {
    EXPECT_NE(*found, Pattern(3, kSize));
  }
}

class KeptRollbackFaultsTest : public RollbackFaultsTest {};

INSTANTIATE_TEST_SUITE_P(
    Stores, KeptRollbackFaultsTest,
    ::testing::Combine(::testing::Values(Queue::kIoUring, Queue::kThreads),
                       ::testing::Values(true), ::testing::Bool()),
    CaseName);

// The file itself stays at a commit that was finished, or was being made.
TEST_P(KeptRollbackFaultsTest, TheFileReopensAtACommitAfterARollback) {
  for (const auto kind : {Kind::kWrite, Kind::kSync}) {
    const int64_t requests = Requests(kind, 3);
    for (int64_t nth = 0; nth < requests; ++nth) {
      for (const bool writes : {false, true}) {
        {
          const auto store = MakeAfter(2);
          system_.Inject({kind, nth, 1, Effect::kError, EIO});
          ASSERT_FALSE(RunStep(*store, 3).ok());
          ASSERT_OK(store->Rollback());
          EXPECT_EQ(store->commit(), 2);
          ASSERT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(2));
          if (writes) {
            ASSERT_OK(WriteStep(*store, 9));
          }
        }
        const auto store = Reopen();
        // If the last sync has failed, the record can be there all the same.
        const bool made = kind == Kind::kSync && nth == 1 && !writes;
        EXPECT_EQ(store->commit(), made ? 3 : 2) << nth;
        EXPECT_EQ(*ReadNow(*store, "region", 0, kSize),
                  AfterStep(store->commit()));
        // The reopened store goes back to where it was reopened.
        ASSERT_OK(WriteStep(*store, 9));
        ASSERT_OK(store->Rollback());
        EXPECT_EQ(*ReadNow(*store, "region", 0, kSize),
                  AfterStep(store->commit()));
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
