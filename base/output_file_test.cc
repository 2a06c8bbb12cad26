#include "base/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/file_size_limit.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using ::fsdp::testing::FileSizeLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class OutputFileTest : public ::testing::Test {
 protected:
  OutputFileTest()
      : directory_(
            fs::path(::testing::TempDir()) /
            ::testing::UnitTest::GetInstance()->current_test_info()->name()),
        path_(directory_ / "out") {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  static std::string Contents(const fs::path& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  const fs::path directory_;
  const std::string path_;
};

TEST_F(OutputFileTest, HoldsWhatWasWrittenAndNothingElseIsLeft) {
  EXPECT_OK(WriteOutputFile(path_, "first"));
  EXPECT_OK(WriteOutputFile(path_, "second, longer"));
  EXPECT_OK(WriteOutputFile(path_, "third"));
  EXPECT_EQ(Contents(path_), "third");
  EXPECT_THAT(Names(), UnorderedElementsAre("out"));
}

TEST_F(OutputFileTest, ToOpenOneChangesNothing) {
  {
    EXPECT_OK(OutputFile::Open(path_));
    EXPECT_THAT(Names(), UnorderedElementsAre());
  }
  std::ofstream(path_) << "before";
  EXPECT_OK(OutputFile::Open(path_));
  EXPECT_EQ(Contents(path_), "before");
}

TEST_F(OutputFileTest, RefusesWhatCannotBeWritten) {
  EXPECT_THAT(OutputFile::Open(directory_ / "no" / "out"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/out")));
  EXPECT_THAT(
      OutputFile::Open(directory_),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("directory")));
}

// A disk that fills up in the middle.
TEST_F(OutputFileTest, AFileThatCannotBeWholeKeepsWhatItHeld) {
  std::ofstream(path_) << "before";
  const FileSizeLimit limit(4096);
  EXPECT_THAT(WriteOutputFile(path_, std::string(10000, 'x')),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr(path_), HasSubstr("ulimit -f"))));
  EXPECT_EQ(Contents(path_), "before");
  EXPECT_THAT(Names(), UnorderedElementsAre("out"));
}

TEST_F(OutputFileTest, ALinkIsReplacedAndWhatItNamesIsNot) {
  std::ofstream(directory_ / "victim") << "untouched";
  fs::create_symlink("victim", path_);
  EXPECT_OK(WriteOutputFile(path_, "mine"));
  EXPECT_EQ(Contents(directory_ / "victim"), "untouched");
  EXPECT_FALSE(fs::is_symlink(path_));
  EXPECT_EQ(Contents(path_), "mine");
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
  // More than a pipe takes, and nobody reads.
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
  EXPECT_EQ(Contents(path_), "text");
  close(file);
}

TEST_F(OutputFileTest, APartialFileIsGoneUnlessItIsPublished) {
  {
    ASSERT_OK_AND_ASSIGN(const PartialFile file, PartialFile::Create(path_));
    EXPECT_EQ(Names().size(), 1);
  }
  EXPECT_THAT(Names(), UnorderedElementsAre());
}

}  // namespace
}  // namespace fsdp
