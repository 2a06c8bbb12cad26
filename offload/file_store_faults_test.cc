// Tests what a file store says and does when the disk fails.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/system_calls.h"
#include "offload/testing/faulty_system.h"
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
constexpr char kRegion[] = "blocks.3, exp_avg";

class FileStoreFaultsTest : public ::testing::TestWithParam<Queue> {
 protected:
  FileStoreOptions Options() {
    FileStoreOptions options;
    options.directory = ::testing::TempDir();
    options.capacity = 1 << 20;
    options.block_bytes = kBlock;
    options.queue = GetParam();
    options.system = &system_;
    return options;
  }

  // Makes a store with kRegion and "other", both written.
  std::unique_ptr<FileStore> MakeStore() {
    auto store = FileStore::Make(Options()).value();
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
                         [](const ::testing::TestParamInfo<Queue>& info) {
                           return info.param == Queue::kIoUring ? "uring"
                                                                : "threads";
                         });

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

TEST_P(FileStoreFaultsTest, AWriteOfAPartFailsWithItsRead) {
  const auto store = MakeStore();
  system_.Inject({Kind::kRead, 0, 1, Effect::kError, EIO});
  EXPECT_THAT(WriteNow(*store, kRegion, 7, "part"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("block 0")));
  system_.Release();
  EXPECT_EQ(*ReadNow(*store, kRegion, 0, kSize), Pattern(1, kSize));
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

TEST_P(FileStoreFaultsTest, WithoutChecksumsOnlyTheDeviceTells) {
  FileStoreOptions options = Options();
  options.checksums = false;
  ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Make(options));
  ASSERT_OK(store->Create(kRegion, kSize));
  ASSERT_OK(WriteNow(*store, kRegion, 0, Pattern(1, kSize)));
  system_.Inject({Kind::kWrite, 0, 1, Effect::kLost, 0});
  ASSERT_OK(WriteNow(*store, kRegion, 0, Pattern(2, kBlock)));
  EXPECT_EQ(*ReadNow(*store, kRegion, 0, kBlock),
            Pattern(1, kSize).substr(0, kBlock));
  system_.Inject({Kind::kRead, 0, 1, Effect::kError, EIO});
  EXPECT_THAT(ReadNow(*store, kRegion, 0, kBlock),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(kRegion)));
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

}  // namespace
}  // namespace fsdp::offload::testing
