// Compares the user guide's examples with plain LibTorch.
#include <torch/optim/adamw.h>

#include <cmath>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optimizer_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;
constexpr double kPi = 3.14159265358979323846;

// Weights decay, biases do not; the rate follows a cosine.
TEST(GuideTest, GroupsThatDecayAndACosineSchedule) {
  constexpr int kRanks = 2;
  constexpr int kSteps = 5;
  auto plain = MakeNet(kDim, 2);
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& p : plain->parameters()) {
    (p.dim() > 1 ? matrices : vectors).push_back(p);
  }
  torch::optim::AdamW plain_optimizer(
      matrices, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  plain_optimizer.add_param_group(
      {vectors, std::make_unique<torch::optim::AdamWOptions>(
                    torch::optim::AdamWOptions(1e-2).weight_decay(0))});
  for (int step = 0; step < kSteps; ++step) {
    const double lr = 1e-2 * 0.5 * (1 + std::cos(kPi * step / kSteps));
    for (auto& group : plain_optimizer.param_groups()) {
      static_cast<torch::optim::AdamWOptions&>(group.options()).lr(lr);
    }
    plain_optimizer.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor x = Rows(int64_t{3} * rank, 3, kDim);
      (Loss(plain->forward(x), x) / kRanks).backward();
    }
    plain_optimizer.step();
  }
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits()));
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
    FusedAdamW optimizer(DecayGroups(*model, options), options);
    for (int step = 0; step < kSteps; ++step) {
      const double lr = 1e-2 * 0.5 * (1 + std::cos(kPi * step / kSteps));
      for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
      optimizer.zero_grad();
      const at::Tensor x = Rows(int64_t{3} * world.rank(), 3, kDim);
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      optimizer.step();
    }
    return model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          const at::Tensor expected = *plain->named_parameters().find(name);
          return Check(at::allclose(value, expected, 1e-4, 1e-5), name);
        });
  }));
}

}  // namespace
}  // namespace fsdp::testing
