// Training with scaled losses.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/optim/grad_scaler.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;

// Returns this rank's parameters after five clipped steps.
absl::StatusOr<std::vector<at::Tensor>> TrainClipped(Communicator& c,
                                                     bool scaled) {
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(MakeNet(kDim, 2), Unowned(c), BlockUnits()));
  GradScalerOptions options;
  options.enabled = scaled;
  options.growth_interval = 2;
  FSDP_ASSIGN_OR_RETURN(ShardedGradScaler scaler,
                        ShardedGradScaler::Create(c, options));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    const at::Tensor x = Rows(10 * step + c.rank(), 3, kDim);
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(
        model->Backward(scaler.Scale(Loss(model->forward(x), x))));
    FSDP_RETURN_IF_ERROR(scaler.Unscale(model->Ranges()).status());
    FSDP_RETURN_IF_ERROR(model->ClipGradNorm(0.1).status());
    FSDP_ASSIGN_OR_RETURN(const bool stepped,
                          scaler.Step(optimizer, model->Ranges()));
    FSDP_RETURN_IF_ERROR(Check(stepped, "a step was skipped"));
    FSDP_RETURN_IF_ERROR(scaler.Update());
  }
  FSDP_RETURN_IF_ERROR(
      Check(scaler.scale() == (scaled ? 4 * 65536 : 1), "another scale"));
  return model->Parameters();
}

TEST(ScaledTrainingTest, ClippedStepsEqualThoseWithoutAScale) {
  for (const int world_size : {1, 2, 3, 5}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& c) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const std::vector<at::Tensor> scaled,
                            TrainClipped(c, true));
      FSDP_ASSIGN_OR_RETURN(const std::vector<at::Tensor> plain,
                            TrainClipped(c, false));
      for (size_t i = 0; i < plain.size(); ++i) {
        // A power of two as the scale changes no bit of float32 values.
        FSDP_RETURN_IF_ERROR(
            Check(at::equal(scaled[i], plain[i]), "another parameter"));
      }
      return absl::OkStatus();
    }));
  }
}

TEST(ScaledTrainingTest, Float16FindsAScaleAndLearns) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& c) -> absl::Status {
    std::shared_ptr<NetImpl> net = MakeNet(kDim, 2);
    net->to(at::kHalf);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(c), BlockUnits()));
    GradScalerOptions options;
    options.init_scale = 1 << 24;
    FSDP_ASSIGN_OR_RETURN(ShardedGradScaler scaler,
                          ShardedGradScaler::Create(c, options));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    std::vector<double> losses;
    int skipped = 0;
    for (int step = 0; step < 40; ++step) {
      const at::Tensor x = Rows(c.rank(), 3, kDim);
      const at::Tensor loss =
          Loss(model->forward(x.to(at::kHalf)).to(at::kFloat), x);
      losses.push_back(loss.item<double>());
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(model->Backward(scaler.Scale(loss)));
      FSDP_ASSIGN_OR_RETURN(const bool stepped,
                            scaler.Step(optimizer, model->Ranges()));
      skipped += stepped ? 0 : 1;
      FSDP_RETURN_IF_ERROR(scaler.Update());
    }
    return Check(skipped > 0 && skipped < 20 &&
                     losses.back() < 0.5 * losses.front() &&
                     scaler.scale() == std::ldexp(1, 24 - skipped),
                 absl::StrCat(skipped, " skipped, loss ", losses.front(),
                              " to ", losses.back()));
  }));
}

}  // namespace
}  // namespace fsdp::testing
