// Clipped gradients equal those of a plain model, and so does training with
// scaled losses.
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "fsdp/optim/training_step.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int64_t kRowsPerRank = 3;

// Has layers that are not trained or not used beside others.
class PartlyTrainedImpl : public torch::nn::Module {
 public:
  PartlyTrainedImpl()
      : frozen(register_module("frozen", torch::nn::Linear(kDim, kDim))),
        unused(register_module("unused", torch::nn::Linear(kDim, 1))),
        net(register_module("net", MakeNet(kDim, 2))) {
    FillParameters(*this, 1);
    frozen->weight.set_requires_grad(false);
    frozen->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(net, frozen->forward(x));
  }

  torch::nn::Linear frozen;
  torch::nn::Linear unused;
  std::shared_ptr<NetImpl> net;
};

struct Clipped {
  double norm;
  std::map<std::string, at::Tensor> gradients;  // flat; of what was trained
};

Clipped ClipPlain(int world_size, double max_norm, double p) {
  PartlyTrainedImpl model;
  const at::Tensor x = Rows(0, world_size * kRowsPerRank, kDim);
  Loss(model.forward(x), x).backward();
  Clipped result;
  result.norm =
      torch::nn::utils::clip_grad_norm_(model.parameters(), max_norm, p);
  for (const auto& item : model.named_parameters()) {
    if (!item.value().grad().defined()) continue;
    result.gradients[item.key()] = item.value().grad().view(-1);
  }
  return result;
}

absl::Status CheckNorm(const at::Tensor& actual, double expected) {
  const double error = std::abs(actual.item<double>() - expected);
  return Check(error <= 1e-5 * expected,
               absl::StrCat("norm ", actual.item<double>(), " not ", expected));
}

absl::Status CheckGradients(const ShardedModuleBase& model,
                            const Clipped& expected) {
  for (const TensorRange& named : model.Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    const auto whole = expected.gradients.find(named.name);
    if (gradient.defined() != (whole != expected.gradients.end())) {
      return absl::InternalError(absl::StrCat("gradient of ", named.name));
    }
    if (gradient.defined() &&
        !at::allclose(gradient, OwnPart(named, whole->second), 1e-4, 1e-7)) {
      return absl::InternalError(absl::StrCat(named.name, " differs"));
    }
  }
  return absl::OkStatus();
}

TEST(ClipGradNormOfModelTest, EqualsTorchOnTheWholeBatch) {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const double p :
         {1.0, 2.0, 3.5, std::numeric_limits<double>::infinity()}) {
      for (const double max_norm : {0.01, 100.0}) {
        const Clipped expected = ClipPlain(world_size, max_norm, p);
        std::vector<at::Tensor> norms(world_size);
        EXPECT_OK(RunAllRanks(
            world_size,
            [&](Communicator& communicator) -> absl::Status {
              const int rank = communicator.rank();
              FSDP_ASSIGN_OR_RETURN(
                  auto model, FullyShard(std::make_shared<PartlyTrainedImpl>(),
                                         Unowned(communicator), BlockUnits()));
              const at::Tensor x =
                  Rows(rank * kRowsPerRank, kRowsPerRank, kDim);
              FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
              FSDP_ASSIGN_OR_RETURN(norms[rank],
                                    model->ClipGradNorm(max_norm, p));
              FSDP_RETURN_IF_ERROR(CheckNorm(norms[rank], expected.norm));
              return CheckGradients(*model, expected);
            }))
            << world_size << " ranks, p " << p << ", at most " << max_norm;
        for (const at::Tensor& norm : norms) {
          EXPECT_TRUE(at::equal(norm, norms[0]));
        }
      }
    }
  }
}

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
    EXPECT_TRUE(stepped);
    FSDP_RETURN_IF_ERROR(scaler.Update());
  }
  EXPECT_EQ(scaler.scale(), (scaled ? 4 * 65536 : 1));
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
        EXPECT_TRUE(at::equal(scaled[i], plain[i]));
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
