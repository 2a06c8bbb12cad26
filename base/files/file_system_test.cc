#include "base/files/file_system.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/real_files.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::testing {
namespace {

using ::fsdp::testing::ResourceLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// What every FileSystem passes.
struct FileSystemUnderTest {
  // Also keeps what has to live as long as the file system.
  std::function<std::shared_ptr<FileSystem>()> make;
  std::string folder;  // an empty one is made there
};

class FileSystemContract
    : public ::testing::TestWithParam<FileSystemUnderTest> {
 protected:
  void SetUp() override {
    files_ = GetParam().make();
    folder_ = GetParam().folder;
    ASSERT_OK(RemoveTree(*files_, folder_));
    ASSERT_OK(files_->MakeFolder(folder_));
  }
  void TearDown() override { EXPECT_OK(RemoveTree(*files_, folder_)); }

  std::string Path(const std::string& name) const {
    return JoinPath(folder_, name);
  }

  std::shared_ptr<FileSystem> files_;
  std::string folder_;
};

absl::Status WriteAt(File& file, int64_t offset, absl::string_view bytes) {
  return file.PWrite(offset, absl::MakeConstSpan(bytes.data(), bytes.size()));
}

absl::StatusOr<std::string> ReadAt(File& file, int64_t offset, int64_t bytes) {
  std::string out(bytes, '?');
  FSDP_RETURN_IF_ERROR(file.PRead(offset, absl::MakeSpan(&out[0], bytes)));
  return out;
}

TEST_P(FileSystemContract, AFileHasWhatWasWritten) {
  ASSERT_OK_AND_ASSIGN(const auto file,
                       files_->OpenForWriting(Path("a"), Caching::kCached));
  EXPECT_THAT(file->Size(), StatusIs(Code::kOk, ""));
  EXPECT_EQ(*file->Size(), 0);
  EXPECT_OK(WriteAt(*file, 3, "hello"));
  EXPECT_OK(WriteAt(*file, 1, ""));
  EXPECT_OK(file->Sync());
  EXPECT_EQ(*file->Size(), 8);
  ASSERT_OK_AND_ASSIGN(const auto reader,
                       files_->OpenForReading(Path("a"), Caching::kCached));
  EXPECT_EQ(*ReadAt(*reader, 0, 8), absl::string_view("\0\0\0hello", 8));
  EXPECT_EQ(*ReadAt(*reader, 8, 0), "");
  EXPECT_OK(file->SetSize(4));
  EXPECT_OK(file->SetSize(6));
  EXPECT_EQ(*ReadAt(*reader, 0, 6), absl::string_view("\0\0\0h\0\0", 6));
  EXPECT_THAT(ReadAt(*reader, 4, 3),
              StatusIs(Code::kDataLoss,
                       AllOf(HasSubstr(Path("a")),
                             HasSubstr("ends after 2 of the 3 bytes from byte "
                                       "4 on; somebody has cut it off"))));
}

TEST_P(FileSystemContract, WhatIsOpenForWritingIsNotForReading) {
  ASSERT_OK(ReplaceFile(*files_, Path("a"), "first"));
  for (const Caching caching : {Caching::kCached, Caching::kDirect}) {
    ASSERT_OK_AND_ASSIGN(const auto file,
                         files_->OpenForWriting(Path("a"), caching));
    EXPECT_FALSE(ReadAt(*file, 0, 1).ok());
  }
}

TEST_P(FileSystemContract, DirectAndCachedBytesAreTheSame) {
  const std::string path = Path("a");
  ASSERT_OK_AND_ASSIGN(const auto file,
                       files_->OpenForWriting(path, Caching::kDirect));
  const std::string bytes(100003, 'x');
  EXPECT_OK(WriteAt(*file, 0, bytes));
  alignas(4096) static char page[4096];
  for (char& byte : page) byte = 'p';
  EXPECT_OK(WriteAt(*file, 8192, absl::string_view(page, sizeof(page))));
  EXPECT_OK(WriteAt(*file, 8190, "ab"));
  ASSERT_OK_AND_ASSIGN(const auto cached,
                       files_->OpenForReading(path, Caching::kCached));
  EXPECT_EQ(*ReadAt(*cached, 8188, 6), "xxabpp");
  ASSERT_OK_AND_ASSIGN(const auto direct,
                       files_->OpenForReading(path, Caching::kDirect));
  EXPECT_OK(direct->PRead(4096, absl::MakeSpan(page)));
  EXPECT_EQ(absl::string_view(page + 4090, 6), "xxxxab");
  EXPECT_FALSE(WriteAt(*direct, 0, "a").ok());
}

TEST_P(FileSystemContract, WhatIsThereStaysWhenItIsOpened) {
  ASSERT_OK(ReplaceFile(*files_, Path("a"), "first"));
  EXPECT_OK(files_->OpenForWriting(Path("a"), Caching::kDirect));
  EXPECT_EQ(*ReadFile(*files_, Path("a"), 5), "first");
  ASSERT_OK(ReplaceFile(*files_, Path("a"), "2nd"));
  EXPECT_EQ(*ReadFile(*files_, Path("a"), 5), "2nd");
  EXPECT_THAT(ReadFile(*files_, Path("a"), 2),
              StatusIs(Code::kResourceExhausted, HasSubstr("3 bytes")));
  EXPECT_THAT(*files_->List(folder_), ElementsAre("a"));
}

TEST_P(FileSystemContract, Folders) {
  EXPECT_TRUE(*files_->MakeFolder(Path("f")));
  EXPECT_FALSE(*files_->MakeFolder(Path("f")));
  EXPECT_THAT(files_->MakeFolder(Path("x/y")),
              StatusIs(Code::kNotFound, HasSubstr(Path("x"))));
  ASSERT_OK(ReplaceFile(*files_, Path("f/a"), "1"));
  ASSERT_OK(ReplaceFile(*files_, Path("b"), "22"));
  EXPECT_THAT(files_->MakeFolder(Path("b")),
              StatusIs(Code::kFailedPrecondition, HasSubstr("make folder")));
  EXPECT_THAT(*files_->List(folder_), ElementsAre("b", "f"));
  EXPECT_EQ(files_->Stat(Path("f"))->kind, FileInfo::Kind::kFolder);
  EXPECT_EQ(files_->Stat(Path("b"))->kind, FileInfo::Kind::kFile);
  EXPECT_EQ(files_->Stat(Path("b"))->bytes, 2);
  EXPECT_THAT(files_->RemoveFolder(Path("f")),
              StatusIs(Code::kFailedPrecondition, HasSubstr("remove folder")));
  EXPECT_OK(files_->SyncFolder(Path("f")));
  EXPECT_OK(RemoveTree(*files_, Path("f")));
  EXPECT_OK(RemoveTree(*files_, Path("f")));
  EXPECT_THAT(files_->Stat(Path("f")),
              StatusIs(Code::kNotFound, HasSubstr("f")));
  EXPECT_GT(*files_->FreeBytes(folder_), 0);
}

TEST_P(FileSystemContract, WhatIsNotThere) {
  EXPECT_THAT(files_->OpenForReading(Path("x"), Caching::kDirect),
              StatusIs(Code::kNotFound, AllOf(HasSubstr(Path("x")),
                                              HasSubstr("check the path"))));
  EXPECT_THAT(files_->OpenForWriting(Path("x/a"), Caching::kDirect),
              StatusIs(Code::kNotFound, HasSubstr("open")));
  EXPECT_THAT(files_->OpenForReading(folder_, Caching::kCached),
              StatusIs(Code::kFailedPrecondition, HasSubstr("open")));
  EXPECT_THAT(files_->List(Path("x")),
              StatusIs(Code::kNotFound, HasSubstr("x")));
  EXPECT_THAT(files_->RemoveFile(Path("x")),
              StatusIs(Code::kNotFound, HasSubstr("remove")));
  EXPECT_THAT(files_->SyncFolder(Path("x")),
              StatusIs(Code::kNotFound, HasSubstr("x")));
  EXPECT_THAT(files_->Rename(Path("x"), Path("y")),
              StatusIs(Code::kNotFound, HasSubstr("y")));
}

TEST_P(FileSystemContract, Renames) {
  ASSERT_OK(ReplaceFile(*files_, Path("a"), "a"));
  ASSERT_OK(ReplaceFile(*files_, Path("b"), "b"));
  EXPECT_OK(files_->Rename(Path("a"), Path("b")));
  EXPECT_EQ(*ReadFile(*files_, Path("b"), 9), "a");
  ASSERT_OK(files_->MakeFolder(Path("f")));
  ASSERT_OK(files_->MakeFolder(Path("g")));
  ASSERT_OK(ReplaceFile(*files_, Path("g/c"), "c"));
  EXPECT_FALSE(files_->Rename(Path("b"), Path("g")).ok());
  EXPECT_FALSE(files_->Rename(Path("g"), Path("b")).ok());
  EXPECT_THAT(files_->Rename(Path("f"), Path("g")),
              StatusIs(Code::kFailedPrecondition, HasSubstr("g")));
  EXPECT_OK(files_->Rename(Path("g"), Path("h")));
  EXPECT_EQ(*ReadFile(*files_, Path("h/c"), 9), "c");
  EXPECT_THAT(*files_->List(folder_), ElementsAre("b", "f", "h"));
}

TEST_P(FileSystemContract, OneHasTheLock) {
  const std::string path = Path("lock");
  {
    ASSERT_OK_AND_ASSIGN(const auto lock,
                         files_->Lock(path, "process 7, moon"));
    EXPECT_THAT(files_->Lock(path, "process 8"),
                StatusIs(Code::kFailedPrecondition,
                         AllOf(HasSubstr(path), HasSubstr("process 7, moon"))));
  }
  ASSERT_OK_AND_ASSIGN(const auto lock, files_->Lock(path, "process 8"));
  EXPECT_THAT(files_->Lock(path, "9"),
              StatusIs(Code::kFailedPrecondition, HasSubstr("process 8")));
}

// The holder of a lock may remove its file, and still nobody shares the lock.
TEST_P(FileSystemContract, TheFileOfALockMayBeRemoved) {
  const std::string path = Path("lock");
  std::atomic<int> inside{0};
  std::atomic<int> had{0};
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const auto lock = files_->Lock(path, "a thread");
        if (!lock.ok()) continue;
        EXPECT_EQ(inside.fetch_add(1), 0);
        ++had;
        inside.fetch_sub(1);
        EXPECT_OK(files_->RemoveFile(path));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(had, 0);
  EXPECT_THAT(*files_->List(folder_), ::testing::IsEmpty());
}

TEST_P(FileSystemContract, ATreeTooDeepStays) {
  std::string path = folder_;
  for (int i = 0; i < 9; ++i) {
    path = JoinPath(path, "f");
    ASSERT_OK(files_->MakeFolder(path));
  }
  EXPECT_THAT(RemoveTree(*files_, folder_),
              StatusIs(Code::kInvalidArgument, HasSubstr("by hand")));
  EXPECT_OK(RemoveTree(*files_, Path("f/f")));
}

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
  const ResourceLimit limit(RLIMIT_FSIZE, 10000);
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
    const ResourceLimit limit(RLIMIT_FSIZE, 0);
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
  const auto blocks_read = [&](File& from, int64_t begin = 0,
                               int64_t end = kBytes) {
    rusage before = {};
    rusage after = {};
    getrusage(RUSAGE_THREAD, &before);
    EXPECT_OK(
        from.PRead(begin, absl::MakeSpan(memory).subspan(begin, end - begin)));
    getrusage(RUSAGE_THREAD, &after);
    EXPECT_TRUE(absl::string_view(memory, end).substr(begin) ==
                absl::string_view(contents).substr(begin, end - begin));
    return after.ru_inblock - before.ru_inblock;
  };
  EXPECT_EQ(blocks_read(*file), 0);
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED), 0);
  close(descriptor);
  // What goes past the cache is read again the next time.
  const auto past_cache = blocks_read(*file);
  EXPECT_EQ(blocks_read(*file), past_cache);
  // So are the whole pages of a range that begins and ends inside others.
  ASSERT_OK_AND_ASSIGN(const auto direct,
                       RealFileSystem().OpenForReading(path, Caching::kDirect));
  for (int i = 0; i < 2; ++i) {
    EXPECT_GE(blocks_read(*direct, 100, kBytes - 100), past_cache - 16);
  }
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
}  // namespace fsdp::testing
