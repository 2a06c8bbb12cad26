#include "fsdp/state/module_archive.h"

#include <torch/serialize.h>

#include <filesystem>

#include "comm/testing/run_ranks.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;

constexpr int kDim = 5;
constexpr int kBlocks = 2;

// Returns a folder of this test alone.
std::filesystem::path Folder(const std::string& name) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

int NumFiles(const std::filesystem::path& folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    count += entry.exists();
  }
  return count;
}

absl::Status CheckEqual(const torch::nn::Module& actual,
                        const torch::nn::Module& expected) {
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor* value = actual.named_parameters().find(item.key());
    if (value == nullptr || !at::equal(*value, item.value())) {
      return absl::InternalError(item.key());
    }
  }
  return absl::OkStatus();
}

TEST(SaveTest, Rank0AloneWritesAFileForPlainAndShardedModules) {
  for (const int world_size : {1, 2, 3}) {
    const auto folder = Folder(absl::StrCat("save_", world_size));
    EXPECT_OK(RunAllRanks(
        world_size,
        [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto model,
                                FullyShard(MakeNet(kDim, kBlocks, /*seed=*/7),
                                           Unowned(world), BlockUnits()));
          // If another rank wrote, its file would exist.
          torch::save(model, (folder / std::to_string(world.rank())).string());
          const std::string written = (folder / "0").string();
          FSDP_ASSIGN_OR_RETURN(auto other,
                                FullyShard(MakeNet(kDim, kBlocks, /*seed=*/8),
                                           Unowned(world), BlockUnits()));
          torch::load(other, written);
          FSDP_ASSIGN_OR_RETURN(FullParamsScope full,
                                other->SummonFullParams());
          return CheckEqual(*other.module(), *MakeNet(kDim, kBlocks, 7));
        }))
        << world_size << " ranks";
    EXPECT_EQ(NumFiles(folder), 1);
    auto plain = MakeNet(kDim, kBlocks, /*seed=*/8);
    torch::load(plain, (folder / "0").string());
    EXPECT_OK(CheckEqual(*plain, *MakeNet(kDim, kBlocks, 7)));
  }
}

TEST(SaveTest, WhatRank0CannotWriteAllRanksAreTold) {
  const auto folder = Folder("save_refused");
  const std::string path = (folder / "missing" / "model.pt").string();
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks),
                                                 Unowned(world), BlockUnits()));
    absl::Status refused =
        TorchToStatus("saving", [&] { torch::save(model, path); });
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(Rows(0, 2, kDim)).sum()));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run),
              Each(StatusIs(absl::StatusCode::kNotFound, HasSubstr(path))));
  EXPECT_EQ(NumFiles(folder), 0);
}

TEST(SaveTest, AFailureLeavesNothingBehind) {
  const auto folder = Folder("save_into_folder");
  std::filesystem::create_directory(folder / "model.pt");
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks),
                                                 Unowned(world), BlockUnits()));
    return model->Save((folder / "model.pt").string());
  };
  EXPECT_THAT(RunRanks(2, run), Each(::testing::Not(IsOk())));
  EXPECT_EQ(NumFiles(folder), 1);
  EXPECT_TRUE(std::filesystem::is_directory(folder / "model.pt"));
}

}  // namespace
}  // namespace fsdp::testing
