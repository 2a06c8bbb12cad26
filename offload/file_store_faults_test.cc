// Tests what a file store says and does when the disk fails.

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"
#include "offload/file_store.h"
#include "offload/testing/faulty_system.h"
#include "offload/testing/kept_file.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using Effect = DiskFault::Effect;
using ::fsdp::testing::StatusIs;
using Kind = IoRequest::Kind;
using Queue = QueueKind;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kBlock = 8192;
constexpr int64_t kSize = 5 * kBlock + 1021;
constexpr char kRegion[] = "blocks.3, exp_avg";

class FileStoreFaultsTest : public ::testing::TestWithParam<Queue>,
                            protected KeptFile {
 protected:
  FileStoreFaultsTest()
      : KeptFile("file_store_faults_test", 1 << 20, kBlock, GetParam()) {
    options_.keep = false;
    options_.system = &system_;
  }

  // Makes a store with kRegion and "other", both written.
  std::unique_ptr<FileStore> MakeStore() {
    auto store = Make();
    for (const char* name : {kRegion, "other"}) {
      EXPECT_OK(store->Create(name, kSize));
      EXPECT_OK(WriteNow(*store, name, 0, Pattern(1, kSize)));
    }
    return store;
  }

  FaultySystem system_;
};

INSTANTIATE_TEST_SUITE_P(Queues, FileStoreFaultsTest,
                         ::testing::Values(Queue::kIoUring, Queue::kThreads),
                         QueueName);

struct Failure {
  Effect effect;
  int error;
  absl::StatusCode code;
  std::string text;
};

const Failure kWriteFailures[] = {
    {Effect::kError, ENOSPC, absl::StatusCode::kResourceExhausted,
     "No space left"},
    {Effect::kError, EIO, absl::StatusCode::kUnavailable, "Input/output error"},
    {Effect::kError, EINVAL, absl::StatusCode::kUnavailable, "the device"},
    {Effect::kShort, 0, absl::StatusCode::kUnavailable, "bytes were written"},
};

TEST_P(FileStoreFaultsTest, EachWriteFailingInTurnIsNamedAndCanBeMadeGood) {
  for (const Failure& failure : kWriteFailures) {
    for (int64_t nth = 0; nth < 6; ++nth) {
      const auto store = MakeStore();
      system_.Inject({Kind::kWrite, nth, 1, failure.effect, failure.error});
      const std::string bytes = Pattern(2, kSize);
      EXPECT_THAT(
          WriteNow(*store, kRegion, 0, bytes),
          StatusIs(
              failure.code,
              AllOf(HasSubstr(absl::StrCat("write region '", kRegion,
                                           "', block ", nth, ", at ")),
                    HasSubstr(::testing::TempDir()), HasSubstr(failure.text))));
      EXPECT_EQ(system_.seen(), 6);
      system_.Release();
      // This block is lost, and says so; nothing else is.
      for (int64_t block = 0; block < 6; ++block) {
        const int64_t offset = block * kBlock;
        const int64_t size = std::min(kBlock, kSize - offset);
        const auto found = ReadNow(*store, kRegion, offset, size);
        if (block == nth) {
          EXPECT_THAT(found, StatusIs(absl::StatusCode::kDataLoss,
                                      HasSubstr("write it again")));
        } else {
          EXPECT_EQ(*found, bytes.substr(offset, size));
        }
      }
      EXPECT_EQ(*ReadNow(*store, "other", 0, kSize), Pattern(1, kSize));
      EXPECT_THAT(
          WriteNow(*store, kRegion, nth * kBlock + 1, "part of it"),
          StatusIs(absl::StatusCode::kDataLoss, HasSubstr("whole block")));
      EXPECT_THAT(Finish(store->Flush()),
                  StatusIs(absl::StatusCode::kDataLoss,
                           AllOf(HasSubstr(kRegion),
                                 HasSubstr(absl::StrCat("block ", nth)))));
      ASSERT_OK(WriteNow(*store, kRegion, 0, bytes));
      EXPECT_OK(Finish(store->Flush()));
      EXPECT_EQ(*ReadNow(*store, kRegion, 0, kSize), bytes);
    }
  }
}

TEST_P(FileStoreFaultsTest, EachReadFailingInTurnIsNamed) {
  for (const Failure& failure :
       {Failure{Effect::kError, EIO, absl::StatusCode::kUnavailable,
                "Input/output error"},
        Failure{Effect::kShort, 0, absl::StatusCode::kDataLoss,
                "ends after"}}) {
    const auto store = MakeStore();
    for (int64_t nth = 0; nth < 6; ++nth) {
      system_.Inject({Kind::kRead, nth, 1, failure.effect, failure.error});
      EXPECT_THAT(
          ReadNow(*store, kRegion, 0, kSize),
          StatusIs(failure.code,
                   AllOf(HasSubstr(absl::StrCat("read region '", kRegion,
                                                "', block ", nth, ", at ")),
                         HasSubstr(failure.text))));
      system_.Release();
      EXPECT_EQ(*ReadNow(*store, kRegion, 0, kSize), Pattern(1, kSize));
    }
  }
}

TEST_P(FileStoreFaultsTest, AWriteThatTheDiskHasLostIsStale) {
  const auto store = MakeStore();
  system_.Inject({Kind::kWrite, 2, 1, Effect::kLost, 0});
  ASSERT_OK(WriteNow(*store, kRegion, 0, Pattern(2, kSize)));
  system_.Release();
  EXPECT_THAT(
      ReadNow(*store, kRegion, 0, kSize),
      StatusIs(
          absl::StatusCode::kDataLoss,
          AllOf(HasSubstr(kRegion), HasSubstr("block 2"),
                HasSubstr("stale: generation 1 is there, 2 was written"))));
  EXPECT_EQ(*ReadNow(*store, kRegion, 0, 2 * kBlock),
            Pattern(2, kSize).substr(0, 2 * kBlock));
}

TEST_P(FileStoreFaultsTest, AWriteThatIsHalfDoneIsTorn) {
  const auto store = MakeStore();
  system_.Inject({Kind::kWrite, 0, 1, Effect::kTorn, 0});
  ASSERT_OK(WriteNow(*store, kRegion, 0, Pattern(2, kBlock)));
  system_.Release();
  EXPECT_THAT(ReadNow(*store, kRegion, 0, kBlock),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("block 0"), HasSubstr("torn or changed"),
                             HasSubstr("generation 2"))));
}

TEST_P(FileStoreFaultsTest, ADeviceThatHangsMeetsTheDeadline) {
  const auto store = MakeStore();
  const std::string bytes = Pattern(2, kSize);
  system_.Inject({Kind::kWrite, 1, 1, Effect::kHeld, 0});
  ASSERT_OK_AND_ASSIGN(const auto write, store->Write(kRegion, 0, bytes));
  EXPECT_THAT(
      write->Wait(absl::Now() + absl::Milliseconds(20)),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr(absl::StrCat("write region '", kRegion, "', ",
                                            kSize, " bytes from offset 0")),
                     HasSubstr("still running"))));
  // Calls that need no device go on; those that need the write wait for it.
  EXPECT_EQ(*ReadNow(*store, "other", 0, kSize), Pattern(1, kSize));
  EXPECT_THAT(store->Erase(kRegion),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(kRegion), HasSubstr("1 transfers"))));
  std::string found(kSize, '?');
  ASSERT_OK_AND_ASSIGN(const auto read,
                       store->Read(kRegion, 0, absl::MakeSpan(found)));
  EXPECT_THAT(read->Wait(absl::Now() + absl::Milliseconds(20)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, ::testing::_));
  system_.Release();
  EXPECT_OK(write->Wait(absl::Now() + absl::Seconds(60)));
  EXPECT_OK(read->Wait(absl::Now() + absl::Seconds(60)));
  EXPECT_EQ(found, bytes);
  EXPECT_OK(store->Erase(kRegion));
}

TEST_P(FileStoreFaultsTest, AReadDoesNotWaitForAnother) {
  const auto store = MakeStore();
  ASSERT_OK(WriteNow(*store, kRegion, 0, Pattern(2, kSize)));
  system_.Inject({Kind::kRead, 0, 1, Effect::kHeld, 0});
  std::string held(kBlock, '?');
  ASSERT_OK_AND_ASSIGN(const auto read,
                       store->Read(kRegion, 0, absl::MakeSpan(held)));
  EXPECT_OK(ReadNow(*store, kRegion, 0, kBlock));
  system_.Release();
  EXPECT_OK(read->Wait(absl::Now() + absl::Seconds(60)));
}

// Tests commits while the disk fails, and going back to the last flush.

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

// The queue, and whether the file is kept.
using Case = std::tuple<Queue, bool>;

class RollbackFaultsTest : public ::testing::TestWithParam<Case>,
                           protected KeptFile {
 protected:
  RollbackFaultsTest()
      : KeptFile("rollback_faults_test", 1 << 17, kBlock,
                 std::get<0>(GetParam())) {
    options_.system = &system_;
    options_.keep = std::get<1>(GetParam());
    options_.rollback = !options_.keep;
  }

  // Makes a store in which `fault` will happen after so many good steps.
  std::unique_ptr<FileStore> MakeFaulty(const DiskFault& fault,
                                        int64_t steps = 0) {
    std::unique_ptr<FileStore> store = MakeAfter(steps);
    system_.Inject(fault);
    return store;
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
  const auto [queue, keep] = info.param;
  return absl::StrCat(queue == Queue::kIoUring ? "uring" : "threads",
                      keep ? "_kept" : "_scratch");
}

INSTANTIATE_TEST_SUITE_P(Stores, RollbackFaultsTest,
                         ::testing::Combine(::testing::Values(Queue::kIoUring,
                                                              Queue::kThreads),
                                            ::testing::Bool()),
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
        const auto store = MakeFaulty(
            {failure.kind, nth, 1, failure.effect, failure.error}, good);
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
  const auto store = MakeFaulty({Kind::kWrite, 0, 1, Effect::kError, EIO}, 1);
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
  const auto store = MakeFaulty({Kind::kWrite, 2, 1, Effect::kLost, 0}, 1);
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(2, kSize)));
  ASSERT_OK(store->Rollback());
  EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(1));
  system_.Inject({Kind::kWrite, 2, 1, Effect::kLost, 0});
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, kSize)));
  system_.Release();
  EXPECT_THAT(
      ReadNow(*store, "region", 0, kSize),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'region', block 2")));
}

class KeptRollbackFaultsTest : public RollbackFaultsTest {};

INSTANTIATE_TEST_SUITE_P(Stores, KeptRollbackFaultsTest,
                         ::testing::Combine(::testing::Values(Queue::kIoUring,
                                                              Queue::kThreads),
                                            ::testing::Values(true)),
                         CaseName);

// Runs two steps, up to the first error.
absl::Status RunTwoSteps(FileStore& store) {
  FSDP_RETURN_IF_ERROR(RunStep(store, 1));
  return RunStep(store, 2);
}

// Expects the store to be at one of these steps in all its bytes.
void ExpectOneStep(FileStore& store) {
  if (store.commit() == 0) {
    EXPECT_EQ(store.Stats().used_bytes, 0);
  } else {
    EXPECT_EQ(*ReadNow(store, "region", 0, kSize), AfterStep(store.commit()));
  }
}

TEST_P(KeptRollbackFaultsTest,
       EachWriteFailingInTurnLosesNothingThatWasFinished) {
  const int64_t requests =
      Requests(Kind::kWrite, 1) + Requests(Kind::kWrite, 2);
  // Each step writes 8 blocks and a record, and a commit is dropped.
  EXPECT_EQ(requests, 19);
  for (const auto& [effect, error] :
       std::vector<std::pair<Effect, int>>{{Effect::kError, ENOSPC},
                                           {Effect::kError, EIO},
                                           {Effect::kShort, 0}}) {
    for (int64_t nth = 0; nth < requests; ++nth) {
      int64_t finished = 0;
      {
        const auto store = MakeFaulty({Kind::kWrite, nth, 1, effect, error});
        const absl::Status status = RunTwoSteps(*store);
        EXPECT_FALSE(status.ok());
        EXPECT_THAT(std::string(status.message()), HasSubstr(Path()));
        finished = store->commit();
      }
      {
        // A record can be whole although its write was called short.
        const auto store = Reopen();
        EXPECT_THAT(store->commit() - finished, ::testing::AnyOf(0, 1)) << nth;
        ExpectOneStep(*store);
      }
      {
        const auto store = MakeFaulty({Kind::kWrite, nth, 1, effect, error});
        EXPECT_FALSE(RunTwoSteps(*store).ok());
        ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, kSize)));
      }
      {
        const auto store = Reopen();
        EXPECT_EQ(store->commit(), finished) << nth;
        ExpectOneStep(*store);
      }
      // Without the restart, what has failed is made good.
      const auto store = MakeFaulty({Kind::kWrite, nth, 1, effect, error});
      EXPECT_FALSE(RunTwoSteps(*store).ok());
      ASSERT_OK(RunTwoSteps(*store)) << nth;
      EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(2));
    }
  }
}

TEST_P(KeptRollbackFaultsTest, NoFlushIsTrustedAfterASyncThatFailed) {
  const int64_t requests = Requests(Kind::kSync, 1) + Requests(Kind::kSync, 2);
  EXPECT_EQ(requests, 4);
  for (int64_t nth = 0; nth < requests; ++nth) {
    const int64_t finished = nth / 2;
    {
      const auto store = MakeFaulty({Kind::kSync, nth, 1, Effect::kError, EIO});
      const auto failure =
          StatusIs(absl::StatusCode::kUnavailable,
                   AllOf(HasSubstr(absl::StrCat("commit ", finished + 1)),
                         HasSubstr("sync of"), HasSubstr(Path())));
      EXPECT_THAT(RunTwoSteps(*store), failure);
      EXPECT_THAT(Finish(store->Flush()), failure);
      EXPECT_EQ(store->commit(), finished);
      EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), AfterStep(finished + 1));
    }
    {
      // If only the last sync has failed, all is there in this case.
      const auto store = Reopen();
      EXPECT_EQ(store->commit(), finished + nth % 2);
      ExpectOneStep(*store);
    }
    {
      const auto store = MakeFaulty({Kind::kSync, nth, 1, Effect::kError, EIO});
      EXPECT_FALSE(RunTwoSteps(*store).ok());
      ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, kSize)));
    }
    const auto store = Reopen();
    EXPECT_EQ(store->commit(), finished);
    ExpectOneStep(*store);
  }
}

TEST_P(KeptRollbackFaultsTest, AFileThatCannotBeMadeLeavesNothing) {
  for (int64_t nth = 0; nth < 2; ++nth) {
    system_.Inject({Kind::kWrite, nth, 1, Effect::kError, ENOSPC});
    EXPECT_THAT(
        FileStore::Make(options_),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr(Path())));
    EXPECT_FALSE(std::filesystem::exists(Path()));
    EXPECT_FALSE(std::filesystem::exists(Path() + ".new"));
  }
}

// The file itself stays at a commit that was finished, or was being made.
TEST_P(KeptRollbackFaultsTest, TheFileReopensAtACommitAfterARollback) {
  for (const auto kind : {Kind::kWrite, Kind::kSync}) {
    const int64_t requests = Requests(kind, 3);
    for (int64_t nth = 0; nth < requests; ++nth) {
      for (const bool writes : {false, true}) {
        {
          const auto store = MakeFaulty({kind, nth, 1, Effect::kError, EIO}, 2);
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
