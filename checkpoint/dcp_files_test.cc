#include "checkpoint/dcp_files.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/faulty_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::FaultyFileSystem;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;
constexpr char kFolder[] = "/export";

class DcpFilesTest : public ::testing::TestWithParam<int> {
 protected:
  static ExportDcpOptions Into(FileSystem& files) {
    ExportDcpOptions options;
    options.files = &files;
    return options;
  }

  // One step of Adam, then the export.
  static absl::Status TrainAndExport(Communicator& world, FileSystem& files) {
    auto net = MakeNet(kDim, kBlocks);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), BlockUnits()));
    torch::optim::Adam adam(model->Parameters());
    const at::Tensor rows = Rows(world.rank(), 1, kDim);
    Loss(model->forward(rows), rows).backward();
    adam.step();
    TrainingRun run;
    run.model = model.get();
    run.optimizer = &adam;
    return ExportDcp(kFolder, run, Into(files));
  }

  SimulatedFileSystem disk_;
};

TEST_P(DcpFilesTest, HasModelAndStates) {
  ASSERT_TRUE(RunAllRanks(GetParam(), [&](Communicator& world) {
                return TrainAndExport(world, disk_);
              }).ok());
  const auto catalog = ReadDcpCatalog(disk_, kFolder);
  ASSERT_TRUE(catalog.ok()) << catalog.status();
  const auto net = MakeNet(kDim, kBlocks);
  size_t tensors = 0;
  for (const auto& item : net->named_parameters()) {
    const std::string state = absl::StrCat("optim.state.", item.key(), ".");
    for (const std::string& name :
         {absl::StrCat("model.", item.key()), state + "exp_avg",
          state + "exp_avg_sq", state + "step"}) {
      EXPECT_NE(catalog->Find(name), nullptr) << name;
      ++tensors;
    }
  }
  EXPECT_EQ(catalog->tensors().size(), tensors);
}

TEST_P(DcpFilesTest, IsThereWhollyOrNotAtAll) {
  int64_t calls = 1;  // of a whole export, once there was one
  for (int64_t call = -1; call < calls; ++call) {
    FaultyFileSystem files(disk_);
    if (call >= 0) files.FailCall(call, ENOSPC, /*for_good=*/false);
    const std::vector<absl::Status> statuses = RunRanks(
        GetParam(),
        [&](Communicator& world) { return TrainAndExport(world, files); });
    calls = std::max(calls, files.calls());
    if (statuses[0].ok()) {
      EXPECT_THAT(statuses, Each(absl::OkStatus()));
      EXPECT_TRUE(ReadDcpCatalog(disk_, kFolder).ok());
      ASSERT_TRUE(RemoveTree(disk_, kFolder).ok());
      continue;
    }
    EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kResourceExhausted,
                                        HasSubstr("/export"))));
    const auto names = disk_.List("/");
    ASSERT_TRUE(names.ok()) << names.status();
    EXPECT_THAT(*names, IsEmpty()) << "call " << call;
  }
  EXPECT_GT(calls, 5);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DcpFilesTest, ::testing::Values(1, 2, 3));

// What one rank refuses all refuse, at once.
TEST_F(DcpFilesTest, OtherRanksHearOfAnOptimizerThatIsNotKnown) {
  const std::vector<absl::Status> statuses =
      RunRanks(2, [&](Communicator& world) {
        auto net = MakeNet(kDim, kBlocks);
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), BlockUnits()));
        torch::optim::Adam adam(model->Parameters());
        torch::optim::LBFGS lbfgs(model->Parameters());
        TrainingRun run;
        run.model = model.get();
        run.optimizer = &adam;
        if (world.rank() == 1) run.optimizer = &lbfgs;
        return ExportDcp(kFolder, run, Into(disk_));
      });
  EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("rank 1: "))));
}

TEST_F(DcpFilesTest, RefusesWhatIsThereAndWhatIsNone) {
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  EXPECT_THAT(ExportDcp(kFolder, run, Into(disk_)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the run has no model")));
  run.model = net.get();
  ASSERT_TRUE(ExportDcp(absl::StrCat(kFolder, "/"), run, Into(disk_)).ok());
  EXPECT_THAT(ExportDcp(kFolder, run, Into(disk_)),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("/export is there already")));
}

}  // namespace
}  // namespace fsdp::checkpoint
