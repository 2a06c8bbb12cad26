#include "tools/checkpoint/tool.h"

#include <unistd.h>

#include <limits>
#include <memory>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/testing/sample_tensors.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using checkpoint::testing::Contents;
using checkpoint::testing::Floats;
using checkpoint::testing::ModelFiles;
using checkpoint::testing::RankFiles;
using checkpoint::testing::SampleTensor;

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

// "w" F32[3, 2, 2] with 0 to 11, "b" BF16[5] with ones, "scalar" F32[] with
// `scalar`, "empty" F32[0, 3] and "ids" I64[3] with -1, 0 and 1.
std::vector<SampleTensor> SmallModel(float scalar = 7) {
  return {Floats("w", {3, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}),
          {{"b", Dtype::kBF16, {5}}, Raw(std::vector<uint16_t>(5, 0x3f80))},
          Floats("scalar", {}, {scalar}),
          Floats("empty", {0, 3}, {}),
          {{"ids", Dtype::kI64, {3}}, Raw<int64_t>({-1, 0, 1})}};
}

// Writes files into a new folder.
absl::Status WriteFolder(FileSystem& files, const std::string& folder,
                         const Contents& contents) {
  FSDP_RETURN_IF_ERROR(files.MakeFolder(folder).status());
  return checkpoint::testing::WriteFiles(files, folder, 0, contents).status();
}

// A committed checkpoint of a run: the model, as its optimizer's "exp_avg"
// the tensor "w", and files that have no tensors of the model.
absl::Status SaveRun(FileSystem& files, const std::string& root, int64_t step,
                     absl::Span<const SampleTensor> model) {
  Contents contents = ModelFiles(model);
  for (auto& [name, bytes] : ModelFiles(model.first(1), "exp_avg")) {
    contents[absl::StrCat("optimizer/", name)] = bytes;
  }
  for (auto& [name, bytes] : ModelFiles(model.first(1), "rank-00000")) {
    contents[absl::StrCat("ranks/", name)] = bytes;
  }
  contents["training.json"] = "{}";
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointFolder> folder,
                        CheckpointFolder::Claim(files, root));
  return checkpoint::testing::Save(files, *folder, step, contents);
}

// Changes a byte of a file.
absl::Status FlipByte(FileSystem& files, const std::string& path,
                      int64_t offset) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> before,
                        files.OpenForReading(path, Caching::kCached));
  char byte = 0;
  FSDP_RETURN_IF_ERROR(before->PRead(offset, absl::MakeSpan(&byte, 1)));
  byte = static_cast<char>(byte ^ 1);
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForWriting(path, Caching::kCached));
  return file->PWrite(offset, absl::MakeConstSpan(&byte, 1));
}

struct Ended {
  int code = 0;
  std::string out;
  std::string err;
};

// The program with these words, on the machine's disk.
Ended Tool(const std::vector<std::string>& words, bool progress = false) {
  std::ostringstream out;
  std::ostringstream err;
  Ended ended;
  ended.code = RunTool(RealFileSystem(), words, {out, err, progress});
  ended.out = out.str();
  ended.err = err.str();
  return ended;
}

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(RemoveTree(files_, root_));
    ASSERT_OK(files_.MakeFolder(root_));
    ASSERT_OK(SaveRun(files_, Path("run"), 3, SmallModel(1)));
    ASSERT_OK(SaveRun(files_, Path("run"), 7, SmallModel(2)));
  }
  void TearDown() override { ASSERT_OK(RemoveTree(files_, root_)); }

  std::string Path(const std::string& name) const {
    return JoinPath(root_, name);
  }

  FileSystem& files_ = RealFileSystem();
  const std::string root_ =
      absl::StrCat(::testing::TempDir(), "/tool_test.", getpid());
};

TEST_F(ToolTest, ListsARunAndVerifiesIt) {
  const Ended list = Tool({"ls", Path("run")});
  EXPECT_EQ(list.code, kFine);
  EXPECT_THAT(list.out, HasSubstr("  latest\n"));
  EXPECT_THAT(list.err, IsEmpty());
  EXPECT_EQ(Tool({"verify", Path("run")}).code, kFine);
  EXPECT_THAT(Tool({"verify", Path("run")}, /*progress=*/true).err,
              HasSubstr("\rverify: 100 % of "));
  ASSERT_OK(FlipByte(files_, Path("run/step-3/model.safetensors"), 4100));
  const Ended damaged = Tool({"verify", Path("run")});
  EXPECT_EQ(damaged.code, kFound);
  EXPECT_THAT(damaged.out, HasSubstr("MiB [0, 1) are damaged"));
}

TEST_F(ToolTest, Consolidates) {
  ASSERT_OK(WriteFolder(files_, Path("ranks"), RankFiles(SmallModel(2), 3)));
  const Ended whole = Tool({"consolidate", Path("ranks"), Path("whole"), "40"});
  EXPECT_EQ(whole.code, kFine) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr(": tensors 5, files 2, "));
  EXPECT_EQ(Tool({"consolidate", Path("ranks"), Path("one")}).code, kFine);
}

TEST_F(ToolTest, SaysWhatIsWrong) {
  struct Case {
    std::vector<std::string> words;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{
           {{"frobnicate"},
            "checkpoint: \"frobnicate\" is no command, or takes other "
            "arguments; see checkpoint --help"},
           {{"ls"}, "\"ls\" is no command, or takes other arguments"},
           {{"verify", "a", "b"}, "\"verify\" is no command, or takes other"},
           {{"verify", Path("none")}, Path("none")},
           {{"consolidate", Path("run"), Path("out")},
            "tools/interop/dcp.py model"},
           {{"consolidate", Path("run"), Path("out"), "0"},
            "0 is no number of bytes"}}) {
    const Ended ended = Tool(c.words);
    EXPECT_EQ(ended.code, kFailed);
    EXPECT_THAT(ended.err, HasSubstr(c.text));
    EXPECT_THAT(ended.out, IsEmpty());
  }
}

TEST_F(ToolTest, Helps) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{}, {"--help"}, {"help"}}) {
    const Ended ended = Tool(words);
    EXPECT_EQ(ended.code, kFine);
    for (const char* command : {"ls", "verify", "consolidate"}) {
      EXPECT_THAT(ended.out, HasSubstr(absl::StrCat("checkpoint ", command)));
    }
  }
}

TEST(SizeTextTest, Sizes) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(999), "999 B");
  EXPECT_EQ(SizeText(1000), "1.00 kB");
  EXPECT_EQ(SizeText(999'994), "999.99 kB");
  EXPECT_EQ(SizeText(999'996), "1.00 MB");
  EXPECT_EQ(SizeText(std::numeric_limits<int64_t>::max()), "9.22 EB");
}

TEST(ListTest, CheckpointsOfARun) {
  SimulatedFileSystem files;
  for (const int step : {3, 5, 12}) {
    ASSERT_OK(SaveRun(files, "/run", step, SmallModel()));
  }
  ASSERT_OK(files.MakeFolder("/run/step-9.incomplete-77"));
  ASSERT_OK(files.MakeFolder("/run/step-1.deleted"));
  ASSERT_OK(FlipByte(files, "/run/step-5/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run"));
  EXPECT_THAT(text, ContainsRegex(" 1 +\\?  partly removed"));
  EXPECT_THAT(text, ContainsRegex(" 3 +[0-9.]+ kB\n"));
  EXPECT_THAT(text, ContainsRegex(" 12 .* kB  latest\n"));
  EXPECT_THAT(text, ContainsRegex(" 9 +\\?  incomplete: being"));
  EXPECT_THAT(text, ContainsRegex(" 5 .*damaged: /run/step-5/manifest.json"));
}

TEST(ListTest, WhatIsNoRun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  EXPECT_THAT(List(files, "/run/step-3"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("/run/step-3 is not the folder of a run")));
  EXPECT_THAT(List(files, "/nothing"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nothing")));
}

TEST(VerifyTest, AllCheckpointsOfARun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 12, SmallModel()));
  int calls = 0;
  ASSERT_OK_AND_ASSIGN(
      const VerifyResult result,
      Verify(files, "/run", [&calls](int64_t, int64_t) { ++calls; }));
  EXPECT_EQ(result.problems, 0);
  EXPECT_EQ(result.text, "/run/step-3\n/run/step-12\nsound\n");
  EXPECT_GT(calls, 0);
}

// By a run that commits by manifests; otherwise a manifest has been lost.
TEST(VerifyTest, WhatHasNoManifestIsLostOrBeingWritten) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(files.MakeFolder("/run/step-9"));
  ASSERT_OK_AND_ASSIGN(const std::string lost, List(files, "/run"));
  EXPECT_THAT(lost, ContainsRegex(" 9 .*damaged: .*manifest.json"));
  ASSERT_OK_AND_ASSIGN(VerifyResult result, Verify(files, "/run", nullptr));
  EXPECT_EQ(result.problems, 1);
  EXPECT_THAT(result.text, HasSubstr("\n1 problem\n"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-by-manifest", ""));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run"));
  EXPECT_THAT(text, ContainsRegex(" 9 .*incomplete: being"));
  EXPECT_THAT(text, ContainsRegex(" 3 .*latest\n"));
  ASSERT_OK_AND_ASSIGN(result, Verify(files, "/run", nullptr));
  EXPECT_EQ(result.text, "/run/step-3\nsound\n");
}

TEST(VerifyTest, ListsAllProblems) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 4, SmallModel()));
  const std::string step = "/run/step-3/";
  ASSERT_OK(FlipByte(files, step + "model.safetensors", 4100));
  ASSERT_OK(files.RemoveFile(step + "training.json"));
  ASSERT_OK(ReplaceFile(files, step + "a\x1b[2Jb.txt", "?"));
  ASSERT_OK(FlipByte(files, "/run/step-4/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const auto result, Verify(files, "/run", nullptr));
  EXPECT_EQ(result.problems, 4);
  EXPECT_THAT(result.text,
              HasSubstr("model.safetensors: MiB [0, 1) are damaged"));
  EXPECT_THAT(result.text, HasSubstr("training.json: is missing"));
  EXPECT_THAT(result.text, HasSubstr("a\\x1b[2Jb.txt: is there"));
  EXPECT_THAT(result.text, HasSubstr("/run/step-4/manifest.json"));
  EXPECT_THAT(result.text, HasSubstr("4 problems\n"));
  ASSERT_OK_AND_ASSIGN(const auto one, Verify(files, "/run/step-3", nullptr));
  EXPECT_EQ(one.problems, 3);
}

TEST(VerifyTest, NothingToVerify) {
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/run"));
  const auto refuses = [](const char* text) {
    return StatusIs(absl::StatusCode::kNotFound, HasSubstr(text));
  };
  EXPECT_THAT(Verify(files, "/run", nullptr),
              refuses("/run has no manifest.json"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-checkpoints", ""));
  EXPECT_THAT(Verify(files, "/run", nullptr),
              refuses("/run has no checkpoint"));
  EXPECT_THAT(Verify(files, "/no", nullptr), refuses("/no"));
}

// Are they what ranks would have written together?
void ExpectModel(FileSystem& files, const std::string& folder,
                 int64_t max_file_bytes = 1 << 20) {
  const auto expected = ModelFiles(SmallModel(), "model", max_file_bytes);
  EXPECT_THAT(*files.List(folder), ::testing::SizeIs(expected.size()));
  for (const auto& [name, bytes] : expected) {
    EXPECT_EQ(*ReadFile(files, JoinPath(folder, name), 1 << 20), bytes);
  }
}

// Their elements do not fill bytes, so that one rank has all of them.
TEST(ConsolidateTest, PackedElements) {
  SimulatedFileSystem files;
  const SampleTensor packed = {{"p", Dtype::kF4, {6}}, "abc"};
  auto contents = RankFiles(SmallModel(), 2);
  contents.merge(ModelFiles({&packed, 1}, "shard-00003-model"));
  ASSERT_OK(WriteFolder(files, "/ranks", contents));
  ASSERT_OK(Consolidate(files, "/ranks", "/out", {}));
  ASSERT_OK_AND_ASSIGN(const std::string model,
                       ReadFile(files, "/out/model.safetensors", 1 << 20));
  EXPECT_THAT(model, HasSubstr("abc"));
}

TEST(ConsolidateTest, ChecksumsAreChecked) {
  SimulatedFileSystem files;
  auto contents = RankFiles(SmallModel(), 2);
  const std::string damaged = contents.begin()->first;
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<CheckpointFolder> folder,
                       CheckpointFolder::Claim(files, "/run"));
  ASSERT_OK(checkpoint::testing::Save(files, *folder, 3, contents));
  ASSERT_OK(Consolidate(files, "/run", "/out", {}));
  ExpectModel(files, "/out");
  ASSERT_OK(FlipByte(files, "/run/step-3/" + damaged,
                     static_cast<int64_t>(contents[damaged].size()) - 1));
  EXPECT_THAT(Consolidate(files, "/run", "/other", {}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(damaged)));
}

TEST(ConsolidateTest, SeveralFiles) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), 3)));
  ConsolidateOptions options;
  options.max_file_bytes = 40;
  int64_t done = 0;
  int64_t all = 0;
  options.progress = [&](int64_t now, int64_t total) {
    done = now;
    all = total;
  };
  ASSERT_OK(Consolidate(files, "/ranks", "/out", options));
  EXPECT_GT(done, 0);
  EXPECT_EQ(done, all);
  ExpectModel(files, "/out", 40);
}

TEST(ConsolidateTest, Refusals) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  EXPECT_THAT(Consolidate(files, "/hf", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tools/interop/dcp.py model")));
  EXPECT_THAT(Consolidate(files, "/none", "/out", {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/none")));
  ASSERT_OK(files.MakeFolder("/run"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-checkpoints", ""));
  EXPECT_THAT(
      Consolidate(files, "/run", "/out", {}),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("see checkpoint ls")));
  // A rank's file is missing.
  SampleTensor tensor = SmallModel()[0];
  auto contents = RankFiles({&tensor, 1}, 3);
  contents.erase(contents.begin());
  ASSERT_OK(WriteFolder(files, "/ranks", contents));
  EXPECT_THAT(Consolidate(files, "/ranks", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"w\"")));
  EXPECT_THAT(*files.List("/"), ElementsAre("hf", "ranks", "run"));
}

TEST(ConsolidateTest, OfAFullDiskNothingRemains) {
  SimulatedFileSystem disk;
  ASSERT_OK(WriteFolder(disk, "/ranks", RankFiles(SmallModel(), 2)));
  FaultyFileSystem count(disk);
  ASSERT_OK(Consolidate(count, "/ranks", "/counted", {}));
  for (int64_t call = 0; call < count.calls(); ++call) {
    FaultyFileSystem files(disk);
    files.FailCall(call, ENOSPC, /*for_good=*/false);
    const absl::Status status =
        Consolidate(files, "/ranks", "/out", {}).status();
    if (status.ok()) {  // what failed was to tidy up
      ASSERT_OK(disk.Rename("/out", "/whole"));
      ExpectModel(disk, "/whole");
      ASSERT_OK(RemoveTree(disk, "/whole"));
    } else {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                                   HasSubstr("/out")));
      EXPECT_THAT(*disk.List("/"), ::testing::Not(::testing::Contains("out")));
    }
  }
}

TEST(ConsolidateTest, NeedsSpaceAndANameThatIsFree) {
  SimulatedFileSystem disk(/*capacity_bytes=*/20000);
  ASSERT_OK(WriteFolder(disk, "/ranks", RankFiles(SmallModel(), 2)));
  ASSERT_OK(WriteFolder(disk, "/out.incomplete", {{"left", "behind"}}));
  EXPECT_THAT(Consolidate(disk, "/ranks", "/ranks", {}),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("not written over")));
  ASSERT_OK(ReplaceFile(disk, "/full", std::string(*disk.FreeBytes("/"), 'x')));
  EXPECT_THAT(Consolidate(disk, "/ranks", "/out", {}),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       ::testing::AllOf(HasSubstr("/out will have "),
                                        HasSubstr("free space there"))));
  EXPECT_THAT(*disk.List("/"), ElementsAre("full", "ranks"));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
