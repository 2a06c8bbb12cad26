// Tests what a kept file store makes of commits while the disk fails.
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

// Runs two steps, each a commit, up to the first error.
absl::Status RunTwoSteps(FileStore& store) {
  for (const int64_t step : {1, 2}) {
    FSDP_RETURN_IF_ERROR(WriteNow(store, "region", 0, Pattern(step, kSize)));
    FSDP_RETURN_IF_ERROR(WriteNow(store, "step", 0, absl::StrCat(step)));
    FSDP_RETURN_IF_ERROR(Finish(store.Flush()));
  }
  return absl::OkStatus();
}

// Expects the store to be at one of those steps in all its bytes.
void ExpectOneStep(FileStore& store) {
  const int64_t step = store.commit();
  if (step == 0) {
    EXPECT_TRUE(store.Regions().empty());
    return;
  }
  EXPECT_EQ(*ReadNow(store, "step", 0, 1), absl::StrCat(step));
  EXPECT_EQ(*ReadNow(store, "region", 0, kSize), Pattern(step, kSize));
}

class FailingDiskTest : public ::testing::TestWithParam<Queue>,
                        protected KeptFile {
 protected:
  FailingDiskTest()
      : KeptFile("failing_disk_test", 1 << 17, kBlock, GetParam()) {
    options_.system = &system_;
  }

  // Makes a store for RunTwoSteps(), in which `fault` will happen.
  std::unique_ptr<FileStore> MakeFaulty(DiskFault fault) {
    std::filesystem::remove(Path());
    system_.Release();
    std::unique_ptr<FileStore> store = Make();
    EXPECT_OK(store->Create("region", kSize));
    EXPECT_OK(store->Create("step", 1));
    system_.Inject(fault);
    return store;
  }

  // Returns how many requests of the kind two steps have.
  int64_t Requests(Kind kind) {
    const auto store =
        MakeFaulty({kind, std::numeric_limits<int64_t>::max(), 0});
    EXPECT_OK(RunTwoSteps(*store));
    return system_.seen();
  }

  FaultySystem system_;
};

INSTANTIATE_TEST_SUITE_P(Queues, FailingDiskTest,
                         ::testing::Values(Queue::kIoUring, Queue::kThreads),
                         [](const ::testing::TestParamInfo<Queue>& info) {
                           return info.param == Queue::kIoUring ? "uring"
                                                                : "threads";
                         });

TEST_P(FailingDiskTest, EachWriteFailingInTurnLosesNothingThatWasFinished) {
  const int64_t requests = Requests(Kind::kWrite);
  // Each step writes 7 blocks and a record, and a commit is dropped.
  EXPECT_EQ(requests, 17);
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
      EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), Pattern(2, kSize));
    }
  }
}

TEST_P(FailingDiskTest, NoFlushIsTrustedAfterASyncThatFailed) {
  const int64_t requests = Requests(Kind::kSync);
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
      EXPECT_EQ(*ReadNow(*store, "region", 0, kSize),
                Pattern(finished + 1, kSize));
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

TEST_P(FailingDiskTest, AFileThatCannotBeMadeLeavesNothing) {
  for (int64_t nth = 0; nth < 2; ++nth) {
    system_.Inject({Kind::kWrite, nth, 1, Effect::kError, ENOSPC});
    EXPECT_THAT(
        FileStore::Make(options_),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr(Path())));
    EXPECT_FALSE(std::filesystem::exists(Path()));
    EXPECT_FALSE(std::filesystem::exists(Path() + ".new"));
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
