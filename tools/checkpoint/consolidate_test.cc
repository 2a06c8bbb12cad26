#include "tools/checkpoint/consolidate.h"

#include <cerrno>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/faulty_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::FaultyFileSystem;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::RankFiles;
using testing::ReadAll;
using testing::SmallModel;
using testing::SmallTensor;
using testing::WriteFolder;

// The bytes of SmallModel() by name.
std::map<std::string, std::string> Model() {
  std::map<std::string, std::string> model;
  for (const SmallTensor& tensor : SmallModel()) {
    model[tensor.info.name] = tensor.bytes;
  }
  return model;
}

TEST(ConsolidateTest, ThePiecesOfRanks) {
  for (const int ranks : {1, 2, 3, 7}) {
    SimulatedFileSystem files;
    ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), ranks)));
    ASSERT_OK(Consolidate(files, "/ranks", "/out", {}));
    EXPECT_THAT(*files.List("/out"), ElementsAre("model.safetensors"));
    ASSERT_OK_AND_ASSIGN(const auto all, ReadAll(files, "/out"));
    EXPECT_EQ(all, Model());
    // As if ranks had written them together.
    for (const auto& [name, bytes] : ModelFiles(SmallModel())) {
      EXPECT_EQ(*ReadFile(files, JoinPath("/out", name), 1 << 20), bytes);
    }
  }
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
  for (const auto& [name, bytes] : ModelFiles(SmallModel(), "model", 40)) {
    EXPECT_EQ(*ReadFile(files, JoinPath("/out", name), 1 << 20), bytes);
  }
}

TEST(ConsolidateTest, Refusals) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  EXPECT_THAT(Consolidate(files, "/hf", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tools/interop/dcp.py model")));
  EXPECT_THAT(Consolidate(files, "/none", "/out", {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/none")));
  // A rank's file is missing.
  testing::SmallTensor tensor = SmallModel()[0];
  auto contents = RankFiles({&tensor, 1}, 3);
  contents.erase(contents.begin());
  ASSERT_OK(WriteFolder(files, "/ranks", contents));
  EXPECT_THAT(Consolidate(files, "/ranks", "/out", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"w\"")));
  EXPECT_THAT(*files.List("/"), ElementsAre("hf", "ranks"));
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
      EXPECT_EQ(*ReadAll(disk, "/whole"), Model());
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
