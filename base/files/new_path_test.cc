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
using Kind = NewPath::Kind;

constexpr char kWhat[] = "tests";

// Writes one file, or a folder with one.
absl::Status Fill(FileSystem& files, const NewPath& output,
                  const std::string& text) {
  return WriteFile(files,
                   output.kind() == Kind::kFolder
                       ? JoinPath(output.incomplete(), "a")
                       : output.incomplete(),
                   text);
}

absl::StatusOr<std::string> TextOf(FileSystem& files, const std::string& path,
                                   Kind kind) {
  return ReadFile(files, kind == Kind::kFolder ? JoinPath(path, "a") : path,
                  1 << 20);
}

absl::Status Make(FileSystem& files, const std::string& path, Kind kind,
                  const std::string& text) {
  NewPath output(files, path, kind);
  FSDP_RETURN_IF_ERROR(output.Claim(kWhat));
  FSDP_RETURN_IF_ERROR(Fill(files, output, text));
  return output.Commit();
}

// --- On every file system, for every kind ------------------------------------

struct Case {
  std::string name;
  std::function<std::shared_ptr<FileSystem>()> make;
  std::string folder;
  Kind kind;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Kind kind : {Kind::kFolder, Kind::kFile}) {
    const int number = static_cast<int>(kind);
    cases.push_back({absl::StrCat("Simulated", number),
                     [] { return std::make_shared<SimulatedFileSystem>(); },
                     "/folder", kind});
    cases.push_back({absl::StrCat("Real", number),
                     [] {
                       return std::shared_ptr<FileSystem>(&RealFileSystem(),
                                                          [](FileSystem*) {});
                     },
                     absl::StrCat(::testing::TempDir(), "/new_path_", number),
                     kind});
  }
  return cases;
}

class NewPathTest : public ::testing::TestWithParam<Case> {
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
  const Kind kind_ = GetParam().kind;
};

TEST_P(NewPathTest, HasItsNameOnceItIsWhole) {
  NewPath output(*files_, path_ + "//", kind_);
  EXPECT_EQ(output.path(), path_);
  EXPECT_EQ(output.incomplete(), path_ + ".incomplete");
  ASSERT_OK(output.Claim(kWhat));
  ASSERT_OK(Fill(*files_, output, "text"));
  EXPECT_THAT(Names(), ElementsAre("out.incomplete", "out.incomplete.lock"));
  ASSERT_OK(output.Commit());
  EXPECT_THAT(Names(), ElementsAre("out"));
  EXPECT_EQ(*TextOf(*files_, path_, kind_), "text");
  output.Discard();
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewPathTest, WithoutCommitNothingRemains) {
  {
    NewPath output(*files_, path_, kind_);
    ASSERT_OK(output.Claim(kWhat));
    ASSERT_OK(Fill(*files_, output, "text"));
  }
  EXPECT_THAT(Names(), IsEmpty());
  NewPath output(*files_, path_, kind_);
  ASSERT_OK(output.Claim(kWhat));
  output.Discard();
  EXPECT_THAT(Names(), IsEmpty());
  ASSERT_OK(Make(*files_, path_, kind_, "text"));
}

TEST_P(NewPathTest, OneHasTheClaim) {
  NewPath first(*files_, path_, kind_);
  ASSERT_OK(first.Claim("was here first"));
  ASSERT_OK(Fill(*files_, first, "text"));
  {
    NewPath second(*files_, path_, kind_);
    EXPECT_THAT(second.Claim(kWhat),
                StatusIs(Code::kFailedPrecondition,
                         AllOf(HasSubstr(path_), HasSubstr("process "),
                               HasSubstr(", which was here first"))));
  }
  ASSERT_OK(first.Commit());
  EXPECT_EQ(*TextOf(*files_, path_, kind_), "text");
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewPathTest, WhatAKilledOneHasLeftIsReplaced) {
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete.lock", "process 7"));
  // What is left may be of another kind.
  ASSERT_OK(files_->MakeFolder(path_ + ".incomplete"));
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete/b", "a longer text"));
  ASSERT_OK(Make(*files_, path_, kind_, "text"));
  EXPECT_EQ(*TextOf(*files_, path_, kind_), "text");
  ASSERT_OK(RemoveTree(*files_, GetParam().folder));
  ASSERT_OK(files_->MakeFolder(GetParam().folder));
  ASSERT_OK(WriteFile(*files_, path_ + ".incomplete", "a longer text"));
  ASSERT_OK(Make(*files_, path_, kind_, "text"));
  EXPECT_EQ(*TextOf(*files_, path_, kind_), "text");
  EXPECT_THAT(Names(), ElementsAre("out"));
  if (kind_ != Kind::kFolder) return;
  EXPECT_THAT(*files_->List(path_), ElementsAre("a"));
}

TEST_P(NewPathTest, WhatIsThereIsNotTouched) {
  ASSERT_OK(WriteFile(*files_, path_, "old"));
  const absl::Status status = Make(*files_, path_, kind_, "new");
  if (kind_ == Kind::kFile) {
    EXPECT_OK(status);
    EXPECT_EQ(*TextOf(*files_, path_, kind_), "new");
  } else {
    EXPECT_THAT(status, StatusIs(Code::kAlreadyExists,
                                 HasSubstr("is not written over")));
    EXPECT_EQ(*ReadFile(*files_, path_, 99), "old");
  }
  ASSERT_OK(files_->RemoveFile(path_));
  ASSERT_OK(files_->MakeFolder(path_));
  EXPECT_THAT(Make(*files_, path_, kind_, "new"),
              kind_ == Kind::kFile
                  ? StatusIs(Code::kInvalidArgument, HasSubstr("is a folder"))
                  : StatusIs(Code::kAlreadyExists, HasSubstr(path_)));
  EXPECT_THAT(Names(), ElementsAre("out"));
}

TEST_P(NewPathTest, WhoTakesTheNameWithoutAClaimKeepsIt) {
  NewPath output(*files_, path_, kind_);
  ASSERT_OK(output.Claim(kWhat));
  ASSERT_OK(Fill(*files_, output, "text"));
  ASSERT_OK(files_->MakeFolder(path_));
  EXPECT_FALSE(output.Commit().ok());
  EXPECT_THAT(Names(), ElementsAre("out"));
  EXPECT_THAT(*files_->List(path_), IsEmpty());
}

TEST_P(NewPathTest, WhatCannotBe) {
  NewPath none(*files_, "", kind_);
  EXPECT_THAT(none.Claim(kWhat),
              StatusIs(Code::kInvalidArgument, HasSubstr("is no path")));
  NewPath root(*files_, "//", kind_);
  EXPECT_FALSE(root.Claim(kWhat).ok());
  NewPath nowhere(*files_, path_ + "/no/such", kind_);
  EXPECT_THAT(nowhere.Claim(kWhat),
              StatusIs(Code::kNotFound,
                       AllOf(HasSubstr("there is no folder " + path_ + "/no"),
                             ::testing::Not(HasSubstr(".lock")))));
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_P(NewPathTest, NothingWrittenIsNoFile) {
  NewPath output(*files_, path_, kind_);
  ASSERT_OK(output.Claim(kWhat));
  if (kind_ == Kind::kFolder) {
    EXPECT_OK(output.Commit());
    EXPECT_THAT(*files_->List(path_), IsEmpty());
    return;
  }
  EXPECT_THAT(output.Commit(),
              StatusIs(Code::kNotFound, HasSubstr("out.incomplete")));
  EXPECT_THAT(Names(), IsEmpty());
}

// Of many that want one name, whoever gets it finds nothing of the others.
TEST_P(NewPathTest, SeveralAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 100;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([this, thread] {
      for (int round = 0; round < kRounds; ++round) {
        const std::string text = absl::StrCat(thread, ".", round);
        NewPath output(*files_, path_, kind_);
        const absl::Status claimed = output.Claim(kWhat);
        if (!claimed.ok()) {
          EXPECT_THAT(claimed,
                      StatusIs(Code::kFailedPrecondition, HasSubstr(path_)));
          continue;
        }
        EXPECT_OK(Fill(*files_, output, text));
        EXPECT_EQ(*TextOf(*files_, output.incomplete(), kind_), text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Names(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, NewPathTest, ::testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

// --- A disk that fails, a process that ends ----------------------------------

class NewPathFaultsTest : public ::testing::TestWithParam<Kind> {
 protected:
  // Returns a disk where a killed call has left something, and the file to be
  // replaced if there is one.
  static std::unique_ptr<SimulatedFileSystem> Disk() {
    auto disk = std::make_unique<SimulatedFileSystem>();
    if (GetParam() == Kind::kFile) {
      EXPECT_OK(ReplaceFile(*disk, "/out", "old"));
    }
    EXPECT_OK(ReplaceFile(*disk, "/out.incomplete", "left"));
    return disk;
  }

  static absl::Status Run(FileSystem& files) {
    return Make(files, "/out", GetParam(), std::string(10000, 'x'));
  }

  static int64_t Calls() {
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    EXPECT_OK(Run(files));
    return files.calls();
  }

  // Checks that the output is whole, or as it was before.
  static void ExpectSound(FileSystem& files, bool whole) {
    const auto text = TextOf(files, "/out", GetParam());
    if (whole) {
      EXPECT_EQ(*text, std::string(10000, 'x'));
    } else if (GetParam() == Kind::kFile) {
      EXPECT_EQ(*text, "old");
    } else {
      EXPECT_FALSE(*Exists(files, "/out"));
    }
  }

  // Checks that a call after a crash succeeds.
  static void ExpectNextWorks(FileSystem& files) {
    if (GetParam() != Kind::kFile && *Exists(files, "/out")) {
      EXPECT_THAT(Run(files),
                  StatusIs(Code::kAlreadyExists, HasSubstr("/out")));
      return;
    }
    EXPECT_OK(Run(files));
    ExpectSound(files, /*whole=*/true);
    EXPECT_THAT(*files.List("/"), ElementsAre("out"));
  }
};

// The process is killed, or power is lost, with each number of seeds.
TEST_P(NewPathFaultsTest, ARunDiesAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call <= calls; ++call) {
    for (int seed = -1; seed < 12; ++seed) {
      SCOPED_TRACE(absl::StrCat("call ", call, " of ", calls, ", seed ", seed));
      const auto disk = Disk();
      FaultyFileSystem files(*disk);
      files.StopAtCall(call);
      // After the last sync only the lock is left to be removed.
      const bool committed = Run(files).ok();
      EXPECT_EQ(committed, call >= calls - 2);
      if (seed < 0) {
        disk->KillProcess();
      } else {
        disk->LosePower(seed);
      }
      const auto text = TextOf(*disk, "/out", GetParam());
      ExpectSound(*disk, text.ok() && text->size() == 10000);
      if (committed) ExpectSound(*disk, /*whole=*/true);
      if (call == calls) {
        EXPECT_THAT(*disk->List("/"), ElementsAre("out"));
      }
      ExpectNextWorks(*disk);
    }
  }
}

// A call that fails once leaves nothing, and an error says so. A file that was
// replaced cannot be brought back.
TEST_P(NewPathFaultsTest, TheDiskFailsOnceAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call < calls; ++call) {
    SCOPED_TRACE(absl::StrCat("call ", call));
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    files.FailCall(call, ENOSPC, /*for_good=*/false);
    const absl::Status status = Run(files);
    if (status.ok()) {
      EXPECT_GE(call, calls - 2);
      ExpectSound(*disk, /*whole=*/true);
    } else {
      EXPECT_THAT(status,
                  StatusIs(Code::kResourceExhausted, HasSubstr("/out")));
      const bool replaced =
          absl::StrContains(status.message(), "/out is replaced, but");
      EXPECT_EQ(replaced, GetParam() == Kind::kFile && call == calls - 3);
      ExpectSound(*disk, replaced);
      if (call == 0) continue;  // at call 0 it had no claim to what was left
      EXPECT_EQ(disk->List("/")->size(), GetParam() == Kind::kFile ? 1u : 0u);
    }
    ExpectNextWorks(*disk);
  }
}

TEST_P(NewPathFaultsTest, TheDiskFailsForGoodAtEveryCall) {
  const int64_t calls = Calls();
  for (int64_t call = 0; call < calls; ++call) {
    SCOPED_TRACE(absl::StrCat("call ", call));
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    files.FailCall(call, EIO, /*for_good=*/true);
    const absl::Status status = Run(files);
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

INSTANTIATE_TEST_SUITE_P(Kinds, NewPathFaultsTest,
                         ::testing::Values(Kind::kFolder, Kind::kFile));

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
