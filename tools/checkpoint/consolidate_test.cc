#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/format/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"
#include "tools/checkpoint/tool.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::FaultyFileSystem;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FlipByte;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::RankFiles;
using ::testing::SizeIs;
using testing::SmallModel;
using testing::WriteFolder;

// Are they what ranks would have written together?
void ExpectModel(FileSystem& files, const std::string& folder,
                 int64_t max_file_bytes = 1 << 20) {
  const auto expected = ModelFiles(SmallModel(), "model", max_file_bytes);
  EXPECT_THAT(*files.List(folder), SizeIs(expected.size()));
  for (const auto& [name, bytes] : expected) {
    EXPECT_EQ(*ReadFile(files, JoinPath(folder, name), 1 << 20), bytes);
  }
}

TEST(ConsolidateTest, ThePiecesOfRanks) {
  for (const int ranks : {1, 2, 3, 7}) {
    SimulatedFileSystem files;
    ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), ranks)));
    ASSERT_OK(Consolidate(files, "/ranks", "/out", {}));
    ExpectModel(files, "/out");
  }
}

// Their elements do not fill bytes, so that one rank has all of them.
TEST(ConsolidateTest, PackedElements) {
  SimulatedFileSystem files;
  const testing::SmallTensor packed = {{"p", Dtype::kF4, {6}}, "abc"};
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
  testing::SmallTensor tensor = SmallModel()[0];
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
      EXPECT_THAT(*disk.List("/"), Not(::testing::Contains("out")));
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
                       AllOf(HasSubstr("/out will have "),
                             HasSubstr("free space there"))));
  EXPECT_THAT(*disk.List("/"), ElementsAre("full", "ranks"));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
