#include "checkpoint/files/testing/file_system_contract.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"

namespace fsdp::checkpoint::testing {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

void FileSystemContract::SetUp() {
  files_ = GetParam().make();
  folder_ = GetParam().folder;
  ASSERT_OK(RemoveTree(*files_, folder_));
  ASSERT_OK(files_->MakeFolder(folder_));
}

void FileSystemContract::TearDown() { EXPECT_OK(RemoveTree(*files_, folder_)); }

namespace {

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

}  // namespace
}  // namespace fsdp::checkpoint::testing
