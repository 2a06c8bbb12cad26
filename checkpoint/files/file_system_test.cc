#include "checkpoint/files/file_system.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/file_system_contract.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::FileSizeLimit;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::shared_ptr<FileSystem> Real() {
  return std::shared_ptr<FileSystem>(&RealFileSystem(), [](FileSystem*) {});
}

// Keeps `base` alive with its wrapper.
std::shared_ptr<FileSystem> FaultyOver(
    const std::shared_ptr<FileSystem>& base) {
  return std::shared_ptr<FileSystem>(
      new FaultyFileSystem(*base), [base](FileSystem* files) { delete files; });
}

std::string TempFolder(absl::string_view name) {
  return absl::StrCat(::testing::TempDir(), "/file_system_test_", name);
}

INSTANTIATE_TEST_SUITE_P(Real, FileSystemContract,
                         ::testing::Values(FileSystemUnderTest{
                             Real, TempFolder("real")}));
INSTANTIATE_TEST_SUITE_P(
    Simulated, FileSystemContract,
    ::testing::Values(FileSystemUnderTest{
        [] { return std::make_shared<SimulatedFileSystem>(); }, "/folder"}));
INSTANTIATE_TEST_SUITE_P(Faulty, FileSystemContract,
                         ::testing::Values(FileSystemUnderTest{
                             [] { return FaultyOver(Real()); },
                             TempFolder("faulty")}));

TEST(FileSystemTest, Paths) {
  EXPECT_EQ(JoinPath("a/b", "c"), "a/b/c");
  EXPECT_EQ(FolderOf("a/b"), "a");
  EXPECT_EQ(FolderOf("a/b/"), "a");
  EXPECT_EQ(FolderOf("/a"), "/");
  EXPECT_EQ(FolderOf("/"), "/");
  EXPECT_EQ(FolderOf("a"), ".");
}

TEST(FileErrorTest, CodesAndWhatToDo) {
  struct Case {
    int error;
    Code code;
    absl::string_view text;
  };
  const Case cases[] = {
      {ENOENT, Code::kNotFound, "check the path"},
      {EACCES, Code::kPermissionDenied, "give this user the right"},
      {EROFS, Code::kPermissionDenied, "mount it for writing"},
      {ENOSPC, Code::kResourceExhausted, "free space there"},
      {EDQUOT, Code::kResourceExhausted, "free space there"},
      {EFBIG, Code::kResourceExhausted, "ulimit -f"},
      {EMFILE, Code::kResourceExhausted, "ulimit -n"},
      {EEXIST, Code::kAlreadyExists, "another name"},
      {ENOTEMPTY, Code::kFailedPrecondition, "somebody else writes there"},
      {EISDIR, Code::kFailedPrecondition, "see what is there"},
      {ENAMETOOLONG, Code::kInvalidArgument, "another name"},
      {EIO, Code::kUnavailable, "the system's log"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(FileError(test.error, "write", "/x/y"),
                StatusIs(test.code, HasSubstr(std::string(test.text))));
  }
  EXPECT_EQ(FileError(ENOSPC, "write", "/x/y").message(),
            "write /x/y: No space left on device; free space there or choose "
            "another folder");
}

TEST(RealFileSystemTest, TheLimitOnFilesIsAnError) {
  const std::string path = TempFolder("limit");
  ASSERT_OK_AND_ASSIGN(const auto file,
                       RealFileSystem().OpenForWriting(path, Caching::kCached));
  const FileSizeLimit limit(10000);
  const std::string bytes(20000, 'x');
  EXPECT_THAT(file->PWrite(0, absl::MakeConstSpan(bytes.data(), bytes.size())),
              StatusIs(Code::kResourceExhausted, HasSubstr("ulimit -f")));
  EXPECT_THAT(file->SetSize(20000),
              StatusIs(Code::kResourceExhausted, HasSubstr(path)));
  EXPECT_OK(RealFileSystem().RemoveFile(path));
}

// On a full disk there is no room for the name of the holder.
TEST(RealFileSystemTest, ALockThatCannotBeWrittenLeavesNoFile) {
  FileSystem& files = RealFileSystem();
  const std::string fresh = TempFolder("fresh_lock");
  const std::string marker = TempFolder("marker_lock");
  ASSERT_OK(WriteFile(files, marker, ""));
  {
    const FileSizeLimit limit(0);
    for (const std::string& path : {fresh, marker}) {
      EXPECT_THAT(files.Lock(path, "me"),
                  StatusIs(Code::kResourceExhausted, HasSubstr(path)));
    }
  }
  EXPECT_FALSE(*Exists(files, fresh));
  EXPECT_TRUE(*Exists(files, marker));
  ASSERT_OK(files.Lock(fresh, "me"));
  ASSERT_OK(files.Lock(marker, "me"));
  EXPECT_OK(files.RemoveFile(fresh));
  EXPECT_OK(files.RemoveFile(marker));
}

TEST(RealFileSystemTest, ALinkIsNotFollowedWhereSomethingIsWritten) {
  FileSystem& files = RealFileSystem();
  const std::string folder = TempFolder("links");
  ASSERT_OK(RemoveTree(files, folder));
  ASSERT_OK(files.MakeFolder(folder));
  ASSERT_OK(files.MakeFolder(JoinPath(folder, "away")));
  ASSERT_OK(ReplaceFile(files, JoinPath(folder, "away/precious"), "!"));
  ASSERT_OK(files.MakeFolder(JoinPath(folder, "tree")));
  const std::string link = JoinPath(folder, "tree/link");
  ASSERT_EQ(symlink(JoinPath(folder, "away").c_str(), link.c_str()), 0);
  EXPECT_EQ(files.Stat(link)->kind, FileInfo::Kind::kOther);
  EXPECT_FALSE(files.OpenForWriting(link, Caching::kCached).ok());
  EXPECT_OK(RemoveTree(files, JoinPath(folder, "tree")));
  EXPECT_EQ(*ReadFile(files, JoinPath(folder, "away/precious"), 9), "!");
  EXPECT_OK(RemoveTree(files, folder));
}

// Where the files lie on a disk; elsewhere no blocks are counted.
TEST(RealFileSystemTest, WhatThePageCacheHasIsNotReadFromTheDisk) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  alignas(4096) static char memory[kBytes];
  const std::string path = TempFolder("cached");
  const std::string contents = RandomBytes(kBytes);
  ASSERT_OK(WriteFile(RealFileSystem(), path, contents));
  ASSERT_OK_AND_ASSIGN(
      const auto file,
      RealFileSystem().OpenForReading(path, Caching::kDirectUnlessCached));
  const auto blocks_read = [&] {
    rusage before = {};
    rusage after = {};
    getrusage(RUSAGE_THREAD, &before);
    EXPECT_OK(file->PRead(0, absl::MakeSpan(memory)));
    getrusage(RUSAGE_THREAD, &after);
    EXPECT_TRUE(absl::string_view(memory, kBytes) == contents);
    return after.ru_inblock - before.ru_inblock;
  };
  EXPECT_EQ(blocks_read(), 0);
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED), 0);
  close(descriptor);
  // What goes past the cache is read again the next time.
  const auto past_cache = blocks_read();
  EXPECT_EQ(blocks_read(), past_cache);
  EXPECT_OK(RealFileSystem().RemoveFile(path));
}

TEST(RealFileSystemTest, NobodyWaitsForAFifo) {
  FileSystem& files = RealFileSystem();
  const std::string fifo = TempFolder("fifo");
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const auto is_refused = StatusIs(Code::kFailedPrecondition,
                                   HasSubstr(fifo + ": it is no regular file"));
  for (const Caching caching : {Caching::kCached, Caching::kDirect}) {
    EXPECT_THAT(files.OpenForReading(fifo, caching), is_refused);
    EXPECT_THAT(files.OpenForWriting(fifo, caching), is_refused);
  }
  EXPECT_THAT(ReadFile(files, fifo, 99), is_refused);
  EXPECT_THAT(files.Lock(fifo, "me"), is_refused);
  EXPECT_OK(files.RemoveFile(fifo));
}

TEST(RealFileSystemTest, TheLockOfADeadProcessIsFree) {
  const std::string path = TempFolder("lock");
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto lock = RealFileSystem().Lock(path, "the child");
    _exit(lock.ok() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*ReadFile(RealFileSystem(), path, 99), "the child\n");
  EXPECT_OK(RealFileSystem().Lock(path, "me"));
  EXPECT_EQ(*ReadFile(RealFileSystem(), path, 99), "me\n");
  EXPECT_OK(RealFileSystem().RemoveFile(path));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
