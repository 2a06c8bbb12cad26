#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/load/run_loader.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Unowned;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;

// An empty folder of its own.
std::string Folder(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  std::filesystem::remove_all(path);
  return path;
}

// A model that is not sharded and has stepped once.
struct Plain {
  explicit Plain(int seed) : model(MakeNet(kDim, kBlocks, seed)) {
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
    for (at::Tensor& parameter : model->parameters()) {
      parameter.mutable_grad() = at::full(parameter.sizes(), 0.5 + seed);
    }
    optimizer->step();
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model.get();
    run.optimizer = optimizer.get();
    run.random_state = false;
    return run;
  }

  std::shared_ptr<NetImpl> model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

absl::Status Save(const std::string& folder, const TrainingRun& run) {
  return RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    const auto checkpoints = Checkpointer::Open(folder, Unowned(world));
    if (!checkpoints.ok()) return checkpoints.status();
    return (*checkpoints)->Save(7, run);
  });
}

LoadContext Alone(const std::string& folder) {
  LoadContext context;
  context.files = &RealFileSystem();
  context.root = folder;
  context.agree = [](const absl::Status& mine) { return mine; };
  return context;
}

TEST(LoadTest, ProgressIsThatOfTheModelAndTheOptimizer) {
  const std::string folder = Folder("load_progress");
  Plain saved(/*seed=*/1);
  ASSERT_OK(Save(folder, saved.AsRun()));
  Plain loaded(/*seed=*/2);
  int64_t expected = 0;
  for (const at::Tensor& parameter : loaded.model->parameters()) {
    expected += 3 * static_cast<int64_t>(parameter.nbytes());
  }
  int64_t last = 0;
  LoadContext context = Alone(folder);
  context.progress = [&](int64_t done, int64_t all) {
    EXPECT_GT(done, last);
    EXPECT_EQ(all, expected);
    last = done;
  };
  TrainingRun run = loaded.AsRun();
  ASSERT_OK(LoadRun(context, 7, run));
  EXPECT_EQ(last, expected);
}

}  // namespace
}  // namespace fsdp::checkpoint
