// Tests what others have put where a kept file should be, and limits of the
// system.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_store.h"
#include "offload/system_calls.h"
#include "offload/testing/kept_file.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

namespace fs = std::filesystem;
using ::fsdp::testing::FileSizeLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kBlock = 8192;

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
      : KeptFile("trust_test", 1 << 18, kBlock,
                 FileStoreOptions::Queue::kThreads) {
    options_.patience = absl::ZeroDuration();
    fs::remove(New());
    fs::remove(Victim());
    std::ofstream(Victim()) << kSecret;
  }

  std::string New() const { return Path() + ".new"; }
  std::string Victim() const { return Path() + ".victim"; }
  std::string VictimsText() const {
    std::ifstream file(Victim(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

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
// another one.
TEST_F(FileStoreTrustTest, TheSecondNameOfAKilledMakerIsForgotten) {
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
    const FileSizeLimit limit(4096);
    EXPECT_THAT(FileStore::Make(options_),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("reserve"), HasSubstr("bytes"),
                               HasSubstr("ulimit -f"))));
  }
}

// The queue's threads write into a file that was made under a greater limit.
TEST_F(FileStoreTrustTest, SoIsALimitThatCameLater) {
  for (const auto queue :
       {FileStoreOptions::Queue::kThreads, FileStoreOptions::Queue::kIoUring}) {
    options_.queue = queue;
    fs::remove(Path());
    const auto store = Make();
    ASSERT_OK(store->Create("region", 100));
    const FileSizeLimit limit(4096);
    EXPECT_THAT(
        WriteNow(*store, "region", 0, Pattern(1, 100)),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("ulimit -f")));
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
