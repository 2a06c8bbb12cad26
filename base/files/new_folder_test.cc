#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

constexpr char kWhat[] = "tests";

absl::Status Fill(FileSystem& files, const NewFolder& output,
                  const std::string& text) {
  return WriteFile(files, JoinPath(output.incomplete(), "a"), text);
}

absl::StatusOr<std::string> TextOf(FileSystem& files, const std::string& path) {
  return ReadFile(files, JoinPath(path, "a"), 1 << 20);
}

absl::Status Make(FileSystem& files, const std::string& path,
                  const std::string& text) {
  NewFolder output(files, path);
  FSDP_RETURN_IF_ERROR(output.Claim(kWhat));
  FSDP_RETURN_IF_ERROR(Fill(files, output, text));
  return output.Commit();
}

// --- On every file system ----------------------------------------------------

struct Case {
  std::string name;
  std::function<std::shared_ptr<FileSystem>()> make;
  std::string folder;
};

std::vector<Case> Cases() {
  return {{"Simulated", [] { return std::make_shared<SimulatedFileSystem>(); },
           "/folder"},
          {"Real",
           [] {
             return std::shared_ptr<FileSystem>(&RealFileSystem(),
                                                [](FileSystem*) {});
           },
           absl::StrCat(::testing::TempDir(), "/new_folder")}};
}

class NewFolderTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    files_ = GetParam().make();
    ASSERT_OK(RemoveTree(*files_, GetParam().folder));
    ASSERT_OK(files_->MakeFolder(GetParam().folder));
    path_ = JoinPath(GetParam().folder, "out");
  }
  void TearDown() override {
    EXPECT_OK(RemoveTree(*files_, GetParam().folder));
  }

  std::vector<std::string> Names() const {
    return files_->List(GetParam().folder)
        .value_or(std::vector<std::string>{"?"});
  }

  std::shared_ptr<FileSystem> files_;
  std::string path_;
};

TEST_P(NewFolderTest, HasItsNameOnceItIsWhole) {
  NewFolder output(*files_, path_ + "//");
  EXPECT_EQ(output.path(), path_);
  EXPECT_EQ(output.incomplete(), path_ + ".incomplete");
  ASSERT_OK(output.Claim(kWhat));
  ASSERT_OK(Fill(*files_, output, "text"));
  EXPECT_THAT(Names(), ElementsAre("out.incomplete", "out.incomplete.lock"));
  ASSERT_OK(output.Commit());
  EXPECT_THAT(Names(), ElementsAre("out"));
  EXPECT_EQ(*TextOf(*files_, path_), "text");
  output.Discard();
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewFolderTest, WithoutCommitNothingRemains) {
  {
    NewFolder output(*files_, path_);
    ASSERT_OK(output.Claim(kWhat));
    ASSERT_OK(Fill(*files_, output, "text"));
  }
  EXPECT_THAT(Names(), IsEmpty());
  NewFolder output(*files_, path_);
  ASSERT_OK(output.Claim(kWhat));
  output.Discard();
  EXPECT_THAT(Names(), IsEmpty());
  ASSERT_OK(Make(*files_, path_, "text"));
}

TEST_P(NewFolderTest, OneHasTheClaim) {
  NewFolder first(*files_, path_);
  ASSERT_OK(first.Claim("was here first"));
  ASSERT_OK(Fill(*files_, first, "text"));
  {
    NewFolder second(*files_, path_);
    EXPECT_THAT(second.Claim(kWhat),
                StatusIs(Code::kFailedPrecondition,
                         AllOf(HasSubstr(path_), HasSubstr("process "),
                               HasSubstr(", which was here first"))));
  }
  ASSERT_OK(first.Commit());
  EXPECT_EQ(*TextOf(*files_, path_), "text");
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewFolderTest, WhatAKilledOneHasLeftIsReplaced) {
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete.lock", "process 7"));
  // What is left may be of another kind.
  ASSERT_OK(files_->MakeFolder(path_ + ".incomplete"));
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete/b", "a longer text"));
  ASSERT_OK(Make(*files_, path_, "text"));
  EXPECT_EQ(*TextOf(*files_, path_), "text");
  ASSERT_OK(RemoveTree(*files_, GetParam().folder));
  ASSERT_OK(files_->MakeFolder(GetParam().folder));
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete", "a longer text"));
  ASSERT_OK(Make(*files_, path_, "text"));
  EXPECT_EQ(*TextOf(*files_, path_), "text");
  EXPECT_THAT(Names(), ElementsAre("out"));
  EXPECT_THAT(*files_->List(path_), ElementsAre("a"));
}

TEST_P(NewFolderTest, WhatIsThereIsNotTouched) {
  ASSERT_OK(WriteFile(*files_, path_, "old"));
  EXPECT_THAT(Make(*files_, path_, "new"),
              StatusIs(Code::kAlreadyExists, HasSubstr("is not written over")));
  EXPECT_EQ(*ReadFile(*files_, path_, 99), "old");
  ASSERT_OK(files_->RemoveFile(path_));
  ASSERT_OK(files_->MakeFolder(path_));
  EXPECT_THAT(Make(*files_, path_, "new"),
              StatusIs(Code::kAlreadyExists, HasSubstr(path_)));
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewFolderTest, WhoTakesTheNameWithoutAClaimKeepsIt) {
  NewFolder output(*files_, path_);
  ASSERT_OK(output.Claim(kWhat));
  ASSERT_OK(Fill(*files_, output, "text"));
  ASSERT_OK(files_->MakeFolder(path_));
  EXPECT_FALSE(output.Commit().ok());
  EXPECT_THAT(Names(), ElementsAre("out"));
  EXPECT_THAT(*files_->List(path_), IsEmpty());
}

TEST_P(NewFolderTest, WhatCannotBe) {
  NewFolder none(*files_, "");
  EXPECT_THAT(none.Claim(kWhat),
              StatusIs(Code::kInvalidArgument, HasSubstr("is no path")));
  NewFolder root(*files_, "//");
  EXPECT_FALSE(root.Claim(kWhat).ok());
  NewFolder nowhere(*files_, path_ + "/no/such");
  EXPECT_THAT(nowhere.Claim(kWhat),
              StatusIs(Code::kNotFound,
                       AllOf(HasSubstr("there is no folder " + path_ + "/no"),
                             ::testing::Not(HasSubstr(".lock")))));
  EXPECT_THAT(Names(), IsEmpty());
}

// Of many that want one name, whoever gets it finds nothing of the others.
TEST_P(NewFolderTest, SeveralAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 100;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      for (int round = 0; round < kRounds; ++round) {
        const std::string text = absl::StrCat(thread, ".", round);
        NewFolder output(*files_, path_);
        const absl::Status claimed = output.Claim(kWhat);
        if (!claimed.ok()) {
          EXPECT_THAT(claimed,
                      StatusIs(Code::kFailedPrecondition, HasSubstr(path_)));
          continue;
        }
        EXPECT_OK(Fill(*files_, output, text));
        EXPECT_EQ(*TextOf(*files_, output.incomplete()), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Names(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, NewFolderTest, ::testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

// --- A disk that fails, a process that ends ----------------------------------

// Returns a disk where a killed call has left something.
std::unique_ptr<SimulatedFileSystem> Disk() {
  auto disk = std::make_unique<SimulatedFileSystem>();
  EXPECT_OK(ReplaceFile(*disk, "/out.incomplete", "left"));
  return disk;
}

absl::Status MakeOut(FileSystem& files) {
  return Make(files, "/out", std::string(10000, 'x'));
}

int64_t Calls() {
  const auto disk = Disk();
  FaultyFileSystem files(*disk);
  EXPECT_OK(MakeOut(files));
  return files.calls();
}

// Checks that the output is whole, or not there.
void ExpectSound(FileSystem& files, bool whole) {
  const auto text = TextOf(files, "/out");
  if (whole) {
    EXPECT_EQ(*text, std::string(10000, 'x'));
  } else {
    EXPECT_FALSE(*Exists(files, "/out"));
  }
}

// Checks that a call after a crash succeeds.
void ExpectNextWorks(FileSystem& files) {
  if (*Exists(files, "/out")) {
    EXPECT_THAT(MakeOut(files),
                StatusIs(Code::kAlreadyExists, HasSubstr("/out")));
    return;
  }
  EXPECT_OK(MakeOut(files));
  ExpectSound(files, /*whole=*/true);
  EXPECT_THAT(*files.List("/"), ElementsAre("out"));
}

// The process is killed, or power is lost, with each number of seeds.
TEST(NewFolderFaultsTest, ARunDiesAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call <= calls; ++call) {
    for (int seed = -1; seed < 12; ++seed) {
      SCOPED_TRACE(absl::StrCat("call ", call, " of ", calls, ", seed ", seed));
      const auto disk = Disk();
      FaultyFileSystem files(*disk);
      files.StopAtCall(call);
      // After the last sync only the lock is left to be removed.
      const bool committed = MakeOut(files).ok();
      EXPECT_EQ(committed, call >= calls - 2);
      if (seed < 0) {
        disk->KillProcess();
      } else {
        disk->LosePower(seed);
      }
      const auto text = TextOf(*disk, "/out");
      ExpectSound(*disk, text.ok() && text->size() == 10000);
      if (committed) ExpectSound(*disk, /*whole=*/true);
      if (call == calls) {
        EXPECT_THAT(*disk->List("/"), ElementsAre("out"));
      }
      ExpectNextWorks(*disk);
    }
  }
}

// A call that fails once leaves nothing, and an error says so.
TEST(NewFolderFaultsTest, TheDiskFailsOnceAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call < calls; ++call) {
    SCOPED_TRACE(absl::StrCat("call ", call));
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    files.FailCall(call, ENOSPC, /*for_good=*/false);
    const absl::Status status = MakeOut(files);
    if (status.ok()) {
      EXPECT_GE(call, calls - 2);
      ExpectSound(*disk, /*whole=*/true);
    } else {
      EXPECT_THAT(status,
                  StatusIs(Code::kResourceExhausted, HasSubstr("/out")));
      ExpectSound(*disk, /*whole=*/false);
      if (call == 0) continue;  // at call 0 it had no claim to what was left
      EXPECT_THAT(*disk->List("/"), IsEmpty());
    }
    ExpectNextWorks(*disk);
  }
}

TEST(NewFolderFaultsTest, TheDiskFailsForGoodAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call < calls; ++call) {
    SCOPED_TRACE(absl::StrCat("call ", call));
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    files.FailCall(call, EIO, /*for_good=*/true);
    const absl::Status status = MakeOut(files);
    bool there = true;
    if (!status.ok()) {
      EXPECT_THAT(status, StatusIs(Code::kUnavailable, HasSubstr("/out")));
      there = absl::StrContains(status.message(), "/out is ");
    }
    EXPECT_EQ(there, call >= calls - 3);
    ExpectSound(*disk, there);
    ExpectNextWorks(*disk);
  }
}

// What one call does: it moves so many bytes, or fails with an errno.
struct Call {
  ssize_t count;
  int error = 0;
};

TEST(MoveAllTest, GoesOnUntilACallFailsOrMovesNothing) {
  const struct {
    int64_t bytes;
    std::vector<Call> calls;
    std::vector<int64_t> offsets;  // where they begin
    int64_t done;
    int error;  // where not all is done
  } cases[] = {{10, {{4}, {1}, {5}}, {0, 4, 5}, 10, 0},
               {10, {{-1, EINTR}, {4}, {-1, EINTR}, {6}}, {0, 0, 4, 4}, 10, 0},
               {10, {{4}, {-1, ENOSPC}}, {0, 4}, 4, ENOSPC},
               {10, {{4}, {0}}, {0, 4}, 4, 0},
               {0, {}, {}, 0, 0}};
  for (const auto& one : cases) {
    std::vector<int64_t> offsets;
    errno = EPERM;
    const int64_t done = MoveAll(one.bytes, [&](int64_t at) -> ssize_t {
      offsets.push_back(at);
      const Call call = one.calls.at(offsets.size() - 1);
      if (call.count < 0) errno = call.error;
      return call.count;
    });
    const int error = errno;
    if (done < one.bytes) EXPECT_EQ(error, one.error);
    EXPECT_EQ(done, one.done);
    EXPECT_EQ(offsets, one.offsets);
  }
}

TEST(FileNamesTest, OnlyNamesInTheFolderArePlain) {
  const std::string nul("a\0b", 3);
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("a\\b"),
        nul, std::string(256, 'a'), std::string("/etc/passwd"),
        std::string("a/"), std::string("a/b")}) {
    EXPECT_FALSE(IsPlainFileName(name)) << name;
  }
  for (const std::string& name :
       {std::string("a..b"), std::string("..."), std::string(255, 'a')}) {
    EXPECT_TRUE(IsPlainFileName(name)) << name;
  }
}

TEST(FileNamesTest, ThePartsOfAPathAreAllOfIt) {
  struct {
    const char* path;
    const char* folder;
    const char* last;
  } const cases[] = {{"optimizer/exp_avg", "optimizer/", "exp_avg"},
                     {"a/b/c", "a/b/", "c"},
                     {"model.safetensors", "", "model.safetensors"},
                     {"a/", "a/", ""},
                     {"/a", "/", "a"},
                     {"", "", ""}};
  for (const auto& c : cases) {
    EXPECT_EQ(FolderPart(c.path), c.folder) << c.path;
    EXPECT_EQ(LastPart(c.path), c.last) << c.path;
  }
}

}  // namespace
}  // namespace fsdp
