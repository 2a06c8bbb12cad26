// Random states: a model with dropout goes on with the numbers that it would
// have drawn. Ranks are processes, since threads draw from one generator: this
// program, started again with a role.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::FreePath;

constexpr char kRole[] = "CHECKPOINT_RANDOM_STATE_TEST_ROLE";
constexpr int64_t kSaved = 4;
constexpr int64_t kSteps = 10;
constexpr int64_t kDim = 5;
constexpr int64_t kRows = 4;  // of each rank and step

class DropoutNetImpl : public torch::nn::Module {
 public:
  DropoutNetImpl()
      : first_(register_module("first", torch::nn::Linear(kDim, 16))),
        dropout_(register_module("dropout", torch::nn::Dropout(0.5))),
        last_(register_module("last", torch::nn::Linear(16, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last_->forward(dropout_->forward(first_->forward(x).tanh()));
  }

 private:
  torch::nn::Linear first_;
  torch::nn::Dropout dropout_;
  torch::nn::Linear last_;
};

std::shared_ptr<DropoutNetImpl> MakeNet(int seed) {
  auto net = std::make_shared<DropoutNetImpl>();
  fsdp::testing::FillParameters(*net, seed);
  return net;
}

// As text: FOLDER,RANKS,RESUMED,WITH_STATES.
struct Role {
  std::string folder;
  int ranks = 1;
  bool resumed = false;      // otherwise it saves on its way
  bool with_states = false;  // TrainingRun::random_state
};

std::string ToString(const Role& role) {
  return absl::StrCat(role.folder, ",", role.ranks, ",", int{role.resumed}, ",",
                      int{role.with_states});
}

Role ParseRole(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  Role role;
  FSDP_CHECK(parts.size() == 4 && absl::SimpleAtoi(parts[1], &role.ranks));
  role.folder = parts[0];
  role.resumed = parts[2] == "1";
  role.with_states = parts[3] == "1";
  return role;
}

absl::Status Train(const std::shared_ptr<::fsdp::comm::Communicator>& world,
                   const Role& role) {
  FSDP_ASSIGN_OR_RETURN(
      auto model, FullyShard(MakeNet(role.resumed ? 5 : 1), world, Options()));
  torch::optim::AdamW optimizer(model->Parameters(),
                                torch::optim::AdamWOptions(0.01));
  TrainingRun run;
  run.model = model.get();
  run.optimizer = &optimizer;
  run.random_state = role.with_states;
  FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                        Checkpointer::Open(role.folder, world));
  // Each rank its own, and another one after it was started again.
  torch::manual_seed(100 * (role.resumed ? 2 : 1) + world->rank());
  int64_t begin = 0;
  if (role.resumed) {
    FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> step,
                          checkpoints->LoadLatest(run));
    begin = step.value_or(-1);
  }
  for (int64_t step = begin; step < kSteps; ++step) {
    if (step == kSaved && !role.resumed) {
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(step, run));
    }
    const int64_t row = (step * world->world_size() + world->rank()) * kRows;
    const at::Tensor x = fsdp::testing::Rows(row, kRows, kDim);
    const at::Tensor loss = model->forward(x).square().mean();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    optimizer.zero_grad();
    std::cout << absl::StrFormat("loss of rank %d, step %d: %.17g\n",
                                 world->rank(), step, loss.item<double>())
              << std::flush;
  }
  return checkpoints->Wait();
}

// The lines of all ranks, of steps from kSaved on, sorted.
std::vector<std::string> LossesOf(const Role& role) {
  const auto [code, output] = ::fsdp::testing::RunThisProgram(
      absl::StrCat(kRole, "='", ToString(role), "'"));
  EXPECT_EQ(code, 0) << output;
  std::vector<std::string> losses;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    const size_t at = line.find("loss of rank");
    if (at == absl::string_view::npos) continue;
    bool before = false;
    for (int64_t step = 0; step < kSaved; ++step) {
      before = before || absl::StrContains(line, absl::StrCat(" ", step, ": "));
    }
    if (!before) losses.emplace_back(line.substr(at));
  }
  std::sort(losses.begin(), losses.end());
  EXPECT_EQ(losses.size(), role.ranks * (kSteps - kSaved)) << output;
  return losses;
}

TEST(RandomStateTest, LossesGoOnWithThemAndOnlyWithThem) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    Role role;
    role.folder = FreePath("random");
    role.ranks = ranks;
    role.with_states = true;
    const std::vector<std::string> unbroken = LossesOf(role);
    role.resumed = true;
    EXPECT_EQ(LossesOf(role), unbroken);
    role.with_states = false;
    const std::vector<std::string> others = LossesOf(role);
    ASSERT_EQ(others.size(), unbroken.size());
    for (size_t i = 0; i < others.size(); ++i) {
      EXPECT_NE(others[i], unbroken[i]);
    }
  }
}

at::Tensor Generator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state().clone();
}

TEST(RandomStateTest, WithoutItTheGeneratorIsLeftAlone) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(FreePath("alone"), nullptr));
  const auto net = MakeNet(1);
  TrainingRun run;
  run.model = net.get();
  for (const bool saved : {false, true}) {
    for (const bool loaded : {false, true}) {
      SCOPED_TRACE(absl::StrCat(saved, loaded));
      const int64_t step = 2 * int{saved} + int{loaded};
      torch::manual_seed(1);
      const at::Tensor first = Generator();
      run.random_state = saved;
      ASSERT_OK(checkpoints->Save(step, run));
      EXPECT_TRUE(at::equal(Generator(), first)) << "saving draws no number";
      torch::manual_seed(2);
      const at::Tensor second = Generator();
      ASSERT_FALSE(at::equal(second, first));
      run.random_state = loaded;
      ASSERT_OK(checkpoints->Load(step, run));
      EXPECT_TRUE(at::equal(Generator(), saved && loaded ? first : second));
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing

int main(int argc, char** argv) {
  namespace testing_of = fsdp::checkpoint::testing;
  if (const char* const text = std::getenv(testing_of::kRole)) {
    const testing_of::Role role = testing_of::ParseRole(text);
    return fsdp::comm::RunRanks(
        argc, argv, role.ranks,
        [&](const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
          return testing_of::Train(ranks, role);
        });
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
