// A file store that is kept: commits, reopening, and what disks do to them.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/testing/kept_file.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Queue = FileStoreOptions::Queue;

constexpr int64_t kBlock = 8192;
constexpr int64_t kSize = 5 * kBlock + 1021;

class FileStoreKeepTest : public ::testing::TestWithParam<Queue>,
                          protected KeptFile {
 protected:
  FileStoreKeepTest() : KeptFile("keep_test", 1 << 18, kBlock, GetParam()) {
    options_.owner = "run 7, rank 1";
    options_.patience = absl::ZeroDuration();
  }

  // Writes over bytes of the file behind the store's back.
  void Overwrite(int64_t offset, const std::string& bytes) {
    std::fstream file(Path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset);
    file << bytes;
  }
  std::string Contents() {
    std::ifstream file(Path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
};

INSTANTIATE_TEST_SUITE_P(Queues, FileStoreKeepTest,
                         ::testing::Values(Queue::kIoUring, Queue::kThreads),
                         [](const ::testing::TestParamInfo<Queue>& info) {
                           return info.param == Queue::kIoUring ? "uring"
                                                                : "threads";
                         });

TEST_P(FileStoreKeepTest, ReopensAtTheLastCommit) {
  {
    const auto store = Make();
    EXPECT_EQ(store->commit(), 0);
    ASSERT_OK(store->Create("region", kSize));
    ASSERT_OK(store->Create("unwritten", 10007));
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, kSize)));
    ASSERT_OK(Finish(store->Flush()));
    EXPECT_EQ(store->commit(), 1);
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(2, kSize)));
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(3, kBlock)));
    ASSERT_OK(store->Create("later", 1));
    ASSERT_OK(store->Erase("unwritten"));
    EXPECT_EQ(*ReadNow(*store, "region", 0, kBlock), Pattern(3, kBlock));
  }
  const auto store = Reopen();
  EXPECT_EQ(store->commit(), 1);
  EXPECT_THAT(store->Regions(), ::testing::ElementsAre("region", "unwritten"));
  EXPECT_EQ(store->Stats().used_bytes, StoredBytes(kSize) + StoredBytes(10007));
  EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), Pattern(1, kSize));
  EXPECT_EQ(*ReadNow(*store, "unwritten", 0, 10007), std::string(10007, '\0'));
}

TEST_P(FileStoreKeepTest, PartsOfBlocksThatAreCommittedAreCopied) {
  std::string wanted = Pattern(1, kSize);
  {
    const auto store = Make();
    ASSERT_OK(store->Create("region", kSize));
    ASSERT_OK(WriteNow(*store, "region", 0, wanted));
    for (int64_t step = 0; step < 5; ++step) {
      ASSERT_OK(Finish(store->Flush()));
      ASSERT_OK(WriteNow(*store, "region", kBlock - 3, "across"));
      ASSERT_OK(WriteNow(*store, "region", kBlock + 7 * step, "more"));
      wanted.replace(kBlock - 3, 6, "across");
      wanted.replace(kBlock + 7 * step, 4, "more");
      EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), wanted);
    }
    ASSERT_OK(Finish(store->Flush()));
  }
  EXPECT_EQ(*ReadNow(*Reopen(), "region", 0, kSize), wanted);
}

TEST_P(FileStoreKeepTest, TheCommitBeforeLastsUntilTheNextWrite) {
  {
    const auto store = Make();
    ASSERT_OK(store->Create("region", kSize));
    for (int64_t step = 1; step <= 3; ++step) {
      ASSERT_OK(WriteNow(*store, "region", 0, Pattern(step, kSize)));
      ASSERT_OK(Finish(store->Flush()));
    }
  }
  {
    ASSERT_OK_AND_ASSIGN(const auto store, FileStore::Reopen(options_, 2));
    EXPECT_EQ(store->commit(), 2);
    EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), Pattern(2, kSize));
  }
  // Commit 3 has been dropped by that.
  EXPECT_THAT(FileStore::Reopen(options_, 3),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("commit 3"), HasSubstr("it has 2"))));
  {
    const auto store = Reopen();
    EXPECT_EQ(store->commit(), 2);
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(4, kSize)));
    ASSERT_OK(Finish(store->Flush()));
    EXPECT_EQ(store->commit(), 3);
    ASSERT_OK(WriteNow(*store, "region", 0, "begins the next step"));
  }
  EXPECT_THAT(FileStore::Reopen(options_, 2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("commit 2"), HasSubstr("it has 3"))));
  EXPECT_EQ(*ReadNow(*Reopen(), "region", 0, kSize), Pattern(4, kSize));
}

TEST_P(FileStoreKeepTest, SpaceOfACommitIsFreeAfterTheNext) {
  const auto store = Make();
  ASSERT_OK(store->Create("old", 1 << 18));
  ASSERT_OK(WriteNow(*store, "old", 0, Pattern(1, 1 << 18)));
  ASSERT_OK(Finish(store->Flush()));
  ASSERT_OK(store->Erase("old"));
  EXPECT_THAT(store->Create("new", 1),
              StatusIs(absl::StatusCode::kResourceExhausted, _));
  ASSERT_OK(Finish(store->Flush()));
  ASSERT_OK(store->Create("new", 1 << 18));
  EXPECT_EQ(*ReadNow(*store, "new", 0, 9), std::string(9, '\0'));
}

TEST_P(FileStoreKeepTest, RefusesMoreRegionsThanItsRecordsHold) {
  const auto store = Make();
  for (int i = 0; i < 8; ++i) ASSERT_OK(store->Create(absl::StrCat(i), 1));
  EXPECT_THAT(store->Create("8", 1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("'8'"), HasSubstr("has 8"))));
  EXPECT_OK(Finish(store->Flush()));
}

TEST_P(FileStoreKeepTest, HasOneProcessAtATimeAndIsMadeOnce) {
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(Path())));
  {
    const auto store = Make();
    EXPECT_THAT(FileStore::Reopen(options_),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr(Path()), HasSubstr("another"))));
  }
  EXPECT_THAT(FileStore::Make(options_),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(Path())));
  EXPECT_FALSE(std::filesystem::exists(Path() + ".new"));
  EXPECT_OK(FileStore::Reopen(options_));
}

TEST_P(FileStoreKeepTest, RefusesTheFileOfAnother) {
  Make();
  options_.owner = "run 7, rank 2";
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("'run 7, rank 1'"),
                             HasSubstr("'run 7, rank 2'"))));
}

TEST_P(FileStoreKeepTest, RefusesWhatIsNoStore) {
  std::ofstream(Path()) << std::string(10000, 'x');
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("header")));
  std::ofstream(Path()) << "short";
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ends after 5")));
}

TEST_P(FileStoreKeepTest, RefusesAFileThatWasCutOff) {
  const auto store = Make();
  ASSERT_OK(store->Create("region", 1 << 18));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 1 << 18)));
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(Path()));
  std::filesystem::resize_file(Path(), bytes - (1 << 18) - kBlock);
  EXPECT_THAT(ReadNow(*store, "region", 0, 1 << 18),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("'region', block 31"),
                             HasSubstr("cut it off"))));
}

TEST_P(FileStoreKeepTest, DoesNotReopenAFileThatWasCutOff) {
  Make();
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(Path()));
  std::filesystem::resize_file(Path(), bytes - 1);
  EXPECT_THAT(
      FileStore::Reopen(options_),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(absl::StrCat(bytes)), HasSubstr("cut it off"))));
}

TEST_P(FileStoreKeepTest, FindsEveryFlippedBit) {
  const std::string bytes = Pattern(1, kSize);
  {
    const auto store = Make();
    ASSERT_OK(store->Create("region", kSize));
    ASSERT_OK(WriteNow(*store, "region", 0, bytes));
    ASSERT_OK(Finish(store->Flush()));
  }
  const auto start = static_cast<int64_t>(Contents().find(bytes));
  for (const int64_t at :
       {int64_t{0}, kBlock - 1, 3 * kBlock + 17, kSize - 1}) {
    const char flipped = static_cast<char>(bytes[at] ^ 16);
    Overwrite(start + at, std::string(1, flipped));
    const auto store = Reopen();
    const int64_t block = at / kBlock;
    EXPECT_THAT(ReadNow(*store, "region", 0, kSize),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(absl::StrCat("block ", block)),
                               HasSubstr("torn or changed"),
                               HasSubstr("last commit"))));
    EXPECT_THAT(ReadNow(*store, "region", block * kBlock, 1),
                StatusIs(absl::StatusCode::kDataLoss, _));
    EXPECT_OK(ReadNow(*store, "region", (block + 1) % 6 * kBlock, 1));
    Overwrite(start + at, bytes.substr(at, 1));
  }
  EXPECT_EQ(*ReadNow(*Reopen(), "region", 0, kSize), bytes);
}

TEST_P(FileStoreKeepTest, ATornCommitLeavesTheOneBefore) {
  {
    const auto store = Make();
    ASSERT_OK(store->Create("region", kSize));
    for (int64_t step = 1; step <= 2; ++step) {
      ASSERT_OK(WriteNow(*store, "region", 0, Pattern(step, kSize)));
      ASSERT_OK(Finish(store->Flush()));
    }
  }
  // Record 2 lies right behind the header.
  Overwrite(4096 + 100, "torn");
  {
    const auto store = Reopen();
    EXPECT_EQ(store->commit(), 1);
    EXPECT_EQ(*ReadNow(*store, "region", 0, kSize), Pattern(1, kSize));
  }
  ASSERT_NE(Contents().find("region"), std::string::npos);
  for (size_t at = Contents().find("region"); at != std::string::npos;
       at = Contents().find("region")) {
    Overwrite(static_cast<int64_t>(at), "REGION");
  }
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("commits")));
}

// Compares random work, restarts and rollbacks with a model of what the last
// commit holds.
TEST_P(FileStoreKeepTest, RestartsAtAnyTimeFindTheLastCommit) {
  struct Region {
    int created = 0;  // by which action
    std::string bytes;
  };
  using Model = std::map<std::string, Region>;
  std::mt19937 random(1);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  Model now;
  Model committed;
  auto store = Make();
  for (int action = 0; action < 400; ++action) {
    const std::string name = absl::StrCat("region ", random() % 6);
    const uint32_t what = random() % 100;
    if (now.count(name) == 0) {
      const int64_t size = below(3 * kBlock);
      if (store->Create(name, size).ok()) {
        now[name] = {action, std::string(size, '\0')};
      }
    } else if (what < 65) {
      const auto size = static_cast<int64_t>(now[name].bytes.size());
      const int64_t offset = below(size + 1);
      const std::string bytes = Pattern(action, below(size - offset + 1));
      ASSERT_OK(WriteNow(*store, name, offset, bytes));
      now[name].bytes.replace(offset, bytes.size(), bytes);
    } else if (what < 73) {
      ASSERT_OK(store->Erase(name));
      now.erase(name);
    } else if (what < 85) {
      ASSERT_OK(Finish(store->Flush()));
      committed = now;
    } else if (what < 93) {
      ASSERT_OK(store->Rollback());
      for (auto& [same, region] : now) {
        const auto before = committed.find(same);
        const bool existed = before != committed.end() &&
                             before->second.created == region.created;
        region.bytes = existed ? before->second.bytes
                               : std::string(region.bytes.size(), '\0');
      }
    } else {
      store.reset();
      store = Reopen();
      now = committed;
      ASSERT_EQ(store->Regions().size(), now.size());
    }
    for (const auto& [other, region] : now) {
      ASSERT_EQ(*ReadNow(*store, other, 0, region.bytes.size()), region.bytes)
          << action;
    }
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
