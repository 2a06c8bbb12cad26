#include "base/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/files/testing/real_files.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::NamesIn;
using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::ResourceLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class OutputFileTest : public ::testing::Test {
 protected:
  std::vector<std::string> Names() const { return NamesIn(directory_); }

  const fs::path directory_ = EmptyFolder("output_file_test");
  const std::string path_ = directory_ / "out";
};

TEST_F(OutputFileTest, HoldsWhatWasWrittenAndNothingElseIsLeft) {
  EXPECT_OK(WriteOutputFile(path_, "first"));
  EXPECT_OK(WriteOutputFile(path_, "second, longer"));
  EXPECT_OK(WriteOutputFile(path_, "third"));
  EXPECT_EQ(ReadWholeFile(path_), "third");
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_F(OutputFileTest, ToOpenOneChangesNothing) {
  {
    EXPECT_OK(OutputFile::Open(path_));
    EXPECT_THAT(Names(), ElementsAre());
  }
  std::ofstream(path_) << "before";
  EXPECT_OK(OutputFile::Open(path_));
  EXPECT_EQ(ReadWholeFile(path_), "before");
}

TEST_F(OutputFileTest, RefusesWhatCannotBeWritten) {
  EXPECT_THAT(OutputFile::Open(directory_ / "no" / "out"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/out")));
  EXPECT_THAT(
      OutputFile::Open(directory_),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("directory")));
}

// The limit stands for a disk that fills up in the middle.
TEST_F(OutputFileTest, AFileThatCannotBeWholeKeepsWhatItHeld) {
  std::ofstream(path_) << "before";
  const ResourceLimit limit(RLIMIT_FSIZE, 4096);
  EXPECT_THAT(WriteOutputFile(path_, std::string(10000, 'x')),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr(path_), HasSubstr("ulimit -f"))));
  EXPECT_EQ(ReadWholeFile(path_), "before");
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_F(OutputFileTest, ALinkIsReplacedAndWhatItNamesIsNot) {
  std::ofstream(directory_ / "victim") << "untouched";
  fs::create_symlink("victim", path_);
  EXPECT_OK(WriteOutputFile(path_, "mine"));
  EXPECT_EQ(ReadWholeFile(directory_ / "victim"), "untouched");
  EXPECT_FALSE(fs::is_symlink(path_));
  EXPECT_EQ(ReadWholeFile(path_), "mine");
}

TEST_F(OutputFileTest, DevicesSayWhatIsWrong) {
  EXPECT_OK(WriteOutputFile("/dev/null", "text"));
  EXPECT_THAT(
      WriteOutputFile("/dev/full", "text"),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("/dev/full")));
}

TEST_F(OutputFileTest, AFifoWithoutAReaderIsRefusedAtOnce) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(OutputFile::Open(path_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("nobody reads it")));
}

TEST_F(OutputFileTest, AReaderOfAFifoGetsAllOfItOrItIsSaid) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  const int reader = open(path_.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  EXPECT_OK(WriteOutputFile(path_, "text"));
  char text[4] = {};
  EXPECT_EQ(read(reader, text, sizeof(text)), 4);
  // This is more than a pipe takes, and nobody reads.
  ASSERT_OK_AND_ASSIGN(OutputFile file, OutputFile::Open(path_));
  EXPECT_THAT(file.Write(std::string(1 << 22, 'x'), absl::Milliseconds(1)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("nobody has read")));
  close(reader);
}

TEST_F(OutputFileTest, TheNameOfAnOpenFileIsNotReplaced) {
  const int file = open(path_.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(file, 0);
  EXPECT_OK(WriteOutputFile(absl::StrCat("/dev/fd/", file), "text"));
  EXPECT_EQ(ReadWholeFile(path_), "text");
  close(file);
}

TEST_F(OutputFileTest, APartialFileIsGoneUnlessItIsPublished) {
  {
    ASSERT_OK_AND_ASSIGN(const PartialFile file, PartialFile::Create(path_));
    EXPECT_EQ(Names().size(), 1);
  }
  EXPECT_THAT(Names(), ElementsAre());
}

using Code = absl::StatusCode;

std::string Path(const std::string& name) {
  return absl::StrCat(::testing::TempDir(), "/regular_file_test_", name);
}

TEST(RegularFileTest, IsReadWhole) {
  const std::string text = std::string(3 << 20, 'x') + "end";
  std::ofstream(Path("text")) << text;
  EXPECT_EQ(*ReadRegularFile(Path("text")), text);
  std::ofstream(Path("empty")).flush();
  EXPECT_EQ(*ReadRegularFile(Path("empty")), "");
}

TEST(RegularFileTest, WhatIsNoneIsRefusedAtOnce) {
  const std::string fifo = Path("fifo");
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const std::string socket_path = Path("socket");
  unlink(socket_path.c_str());
  ASSERT_EQ(mknod(socket_path.c_str(), S_IFSOCK | 0600, 0), 0);
  for (const std::string& path :
       {fifo, socket_path, ::testing::TempDir(), std::string("/dev/zero")}) {
    EXPECT_THAT(
        ReadRegularFile(path),
        StatusIs(Code::kInvalidArgument,
                 AllOf(HasSubstr(path), HasSubstr("is no regular file"))));
  }
  for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR}) {
    EXPECT_EQ(OpenRegularFile(fifo, flags), -1);
    EXPECT_EQ(errno, ENXIO);
  }
  EXPECT_THAT(ReadRegularFile(Path("none")),
              StatusIs(Code::kNotFound, HasSubstr(Path("none"))));
}

constexpr int kLimit = 7;

// Writes up to the limit and then once more; returns errno of the latter, or 0.
int WriteBeyondTheLimit() {
  const ResourceLimit limit(RLIMIT_FSIZE, kLimit);
  const std::string path = ::testing::TempDir() + "/beyond";
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  const std::string text(kLimit, 'x');
  const bool is_full = write(file, text.data(), text.size()) == kLimit;
  errno = 0;
  const bool fails = write(file, "y", 1) < 0;
  const int error = errno;
  close(file);
  unlink(path.c_str());
  return is_full && fails ? error : 0;
}

bool IsBlocked() {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, SIGXFSZ) == 1;
}

bool IsPending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGXFSZ) == 1;
}

TEST(FileSizeErrorsTest, AWriteBeyondTheLimitFailsAndTheProcessLivesOn) {
  {
    const FileSizeErrors errors;
    EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
    EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
    EXPECT_TRUE(IsPending());
  }
  EXPECT_FALSE(IsPending());
  EXPECT_FALSE(IsBlocked());
}

TEST(FileSizeErrorsTest, TheOuterOneLasts) {
  const FileSizeErrors outer;
  { const FileSizeErrors inner; }
  EXPECT_TRUE(IsBlocked());
  EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
}

TEST(FileSizeErrorsTest, WhatWasBlockedBeforeStaysBlockedAndPending) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  raise(SIGXFSZ);
  { const FileSizeErrors errors; }
  EXPECT_TRUE(IsBlocked());
  EXPECT_TRUE(IsPending());
  int taken = 0;
  sigwait(&set, &taken);
  EXPECT_EQ(taken, SIGXFSZ);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

TEST(FileSizeErrorsDeathTest, WithoutOneTheProcessEnds) {
  EXPECT_EXIT(std::exit(WriteBeyondTheLimit()),
              ::testing::KilledBySignal(SIGXFSZ), "");
}

}  // namespace
}  // namespace fsdp
