// A file store that is kept: commits, reopening, and what disks do to them.

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/files/testing/real_files.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "offload/file_store.h"
#include "offload/testing/kept_file.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::ResourceLimit;
using ::fsdp::testing::StatusIs;
using Queue = QueueKind;
using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
  std::string Contents() { return ReadWholeFile(Path()); }
};

INSTANTIATE_TEST_SUITE_P(Queues, FileStoreKeepTest,
                         ::testing::Values(Queue::kIoUring, Queue::kThreads),
                         QueueName);

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
  auto store = Make();
  ASSERT_OK(store->Create("region", 1 << 18));
  ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 1 << 18)));
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(Path()));
  std::filesystem::resize_file(Path(), bytes - (1 << 18) - kBlock);
  EXPECT_THAT(ReadNow(*store, "region", 0, 1 << 18),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("'region', block 31"),
                             HasSubstr("cut it off"))));
  store.reset();
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

// Compares random work and restarts with a model of what the last commit holds.
TEST_P(FileStoreKeepTest, RestartsAtAnyTimeFindTheLastCommit) {
  std::mt19937 random(1);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  std::map<std::string, std::string> now;
  std::map<std::string, std::string> committed;
  int64_t commits = 0;
  auto store = Make();
  for (int action = 0; action < 400; ++action) {
    const std::string name = absl::StrCat("region ", random() % 6);
    const uint32_t what = random() % 100;
    if (now.count(name) == 0) {
      const int64_t size = below(3 * kBlock);
      if (store->Create(name, size).ok()) now[name] = std::string(size, '\0');
    } else if (what < 70) {
      const auto size = static_cast<int64_t>(now[name].size());
      const int64_t offset = below(size + 1);
      const std::string bytes = Pattern(action, below(size - offset + 1));
      ASSERT_OK(WriteNow(*store, name, offset, bytes));
      now[name].replace(offset, bytes.size(), bytes);
    } else if (what < 78) {
      ASSERT_OK(store->Erase(name));
      now.erase(name);
    } else if (what < 91) {
      ASSERT_OK(Finish(store->Flush()));
      committed = now;
      ASSERT_EQ(store->commit(), ++commits);
    } else {
      store.reset();
      store = Reopen();
      now = committed;
      ASSERT_EQ(store->commit(), commits);
      int64_t used = 0;
      for (const auto& [same, bytes] : now) {
        used += StoredBytes(static_cast<int64_t>(bytes.size()));
      }
      ASSERT_EQ(store->Stats().used_bytes, used);
    }
    for (const auto& [other, bytes] : now) {
      ASSERT_EQ(*ReadNow(*store, other, 0, bytes.size()), bytes) << action;
    }
  }
}

// Tests what others have put where a kept file should be, and limits of the
// system.

namespace fs = std::filesystem;

// Files of this process's user seem to be another one's.
class StrangersSystem : public SystemCalls {
 public:
  int Stat(int descriptor, struct stat* found) override {
    const int error = SystemCalls::Stat(descriptor, found);
    found->st_uid = geteuid() + 1;
    return error;
  }
};

class FileStoreTrustTest : public ::testing::Test, protected KeptFile {
 protected:
  FileStoreTrustTest()
      : KeptFile("trust_test", 1 << 18, kBlock, QueueKind::kThreads) {
    options_.patience = absl::ZeroDuration();
    fs::remove(New());
    fs::remove(Victim());
    std::ofstream(Victim()) << kSecret;
  }

  std::string New() const { return Path() + ".new"; }
  std::string Victim() const { return Path() + ".victim"; }
  std::string VictimsText() const { return ReadWholeFile(Victim()); }

  // Makes a file with something in it.
  void MakeOne() {
    const auto store = Make();
    ASSERT_OK(store->Create("region", 100));
    ASSERT_OK(WriteNow(*store, "region", 0, Pattern(1, 100)));
    ASSERT_OK(Finish(store->Flush()));
  }

  static constexpr char kSecret[] = "nobody else's";
};

TEST_F(FileStoreTrustTest, LinksAreNotFollowed) {
  fs::create_symlink(Victim(), New());
  EXPECT_THAT(FileStore::Make(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(New()), HasSubstr("symbolic link"))));
  fs::remove(New());
  // A dangling link is refused, too: following it would make a file.
  fs::create_symlink(Path() + ".elsewhere", New());
  EXPECT_FALSE(FileStore::Make(options_).ok());
  EXPECT_FALSE(fs::exists(Path() + ".elsewhere"));
  fs::remove(New());
  MakeOne();
  fs::rename(Path(), Path() + ".real");
  fs::create_symlink(Path() + ".real", Path());
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(Path()), HasSubstr("symbolic link"))));
  fs::remove(Path() + ".real");
  EXPECT_EQ(VictimsText(), kSecret);
}

TEST_F(FileStoreTrustTest, NeitherIsAFileOfTwoNames) {
  fs::create_hard_link(Victim(), New());
  EXPECT_THAT(FileStore::Make(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(New()), HasSubstr("2 names"))));
  EXPECT_EQ(VictimsText(), kSecret);
  fs::remove(New());
  MakeOne();
  const std::string other = Path() + ".other";
  fs::remove(other);
  fs::create_hard_link(Path(), other);
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(Path()), HasSubstr("2 names"))));
  fs::remove(other);
  EXPECT_OK(FileStore::Reopen(options_));
}

// Such names remain if a file cannot be renamed without the risk of replacing
// another one, and unfinished files of processes that were killed.
TEST_F(FileStoreTrustTest, TheSecondNameOfAKilledMakerIsForgotten) {
  std::ofstream(New()) << std::string(100000, 'x');
  MakeOne();
  fs::create_hard_link(Path(), New());
  EXPECT_OK(FileStore::Reopen(options_));
  EXPECT_FALSE(fs::exists(New()));
}

TEST_F(FileStoreTrustTest, FilesOfAnotherUserAreRefused) {
  StrangersSystem strangers;
  MakeOne();
  options_.system = &strangers;
  const auto refused = StatusIs(
      absl::StatusCode::kPermissionDenied,
      AllOf(HasSubstr(Path()), HasSubstr(absl::StrCat("user ", geteuid() + 1)),
            HasSubstr("of your own")));
  EXPECT_THAT(FileStore::Reopen(options_), refused);
  fs::remove(Path());
  EXPECT_THAT(FileStore::Make(options_), refused);
}

TEST_F(FileStoreTrustTest, FilesThatOthersCanWriteAreRefused) {
  MakeOne();
  for (const mode_t mode : {0660, 0606, 0622}) {
    ASSERT_EQ(chmod(Path().c_str(), mode), 0);
    EXPECT_THAT(FileStore::Reopen(options_),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr(Path()),
                               HasSubstr(absl::StrFormat("(mode %04o)", mode)),
                               HasSubstr("chmod 600"))));
  }
  ASSERT_EQ(chmod(Path().c_str(), 0644), 0);
  EXPECT_OK(FileStore::Reopen(options_));
}

TEST_F(FileStoreTrustTest, OnlyRegularFilesAreOpened) {
  ASSERT_EQ(mkfifo(Path().c_str(), 0600), 0);
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(Path()), HasSubstr("no regular file"))));
  fs::remove(Path());
  fs::create_directory(Path());
  EXPECT_THAT(FileStore::Reopen(options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(Path()), HasSubstr("a directory"))));
}

TEST_F(FileStoreTrustTest, ADirectoryMayBeALink) {
  const std::string link = Path() + ".directory";
  fs::remove(link);
  fs::create_directory_symlink(options_.directory, link);
  options_.directory = link;
  EXPECT_OK(FileStore::Make(options_));
  options_.keep = false;
  EXPECT_OK(FileStore::Make(options_));
  fs::remove(link);
}

TEST_F(FileStoreTrustTest, ALimitOnTheSizeOfFilesIsAnError) {
  for (const bool keep : {false, true}) {
    options_.keep = keep;
    const ResourceLimit limit(RLIMIT_FSIZE, 4096);
    EXPECT_THAT(FileStore::Make(options_),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("reserve"), HasSubstr("bytes"),
                               HasSubstr("ulimit -f"))));
  }
}

// The queue's threads write into a file that was made under a greater limit.
TEST_F(FileStoreTrustTest, SoIsALimitThatCameLater) {
  for (const auto queue : {QueueKind::kThreads, QueueKind::kIoUring}) {
    options_.queue = queue;
    fs::remove(Path());
    const auto store = Make();
    ASSERT_OK(store->Create("region", 100));
    const ResourceLimit limit(RLIMIT_FSIZE, 4096);
    EXPECT_THAT(
        WriteNow(*store, "region", 0, Pattern(1, 100)),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("ulimit -f")));
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
