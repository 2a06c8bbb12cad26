#include <ATen/ops/randn_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "base/testing/warnings.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Missing = OptimizerCheckOptions::Missing;
using Model = FullyShardedDataParallel<NetImpl>;
using torch::optim::SGD;

constexpr int64_t kDim = 3;
constexpr int kRanks = 3;  // of which some have no part of a bias

absl::StatusOr<Model> ShardNet(Communicator& world,
                               const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, 1), Unowned(world), options);
}

TEST(DecayGroupsTest, OnlyTrainableMatricesDecay) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    FSDP_RETURN_IF_ERROR(model->SetTrainable("head.bias", false));
    const auto groups =
        DecayGroups(*model, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    // A frozen parameter may be in no group.
    const torch::optim::AdamW optimizer(groups, {});
    FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer));
    std::map<const void*, double> decays;  // by tensor
    for (const torch::optim::OptimizerParamGroup& group : groups) {
      const auto& options =
          static_cast<const torch::optim::AdamWOptions&>(group.options());
      EXPECT_EQ(options.lr(), 1e-2);
      for (const at::Tensor& shard : group.params()) {
        decays[shard.unsafeGetTensorImpl()] = options.weight_decay();
      }
    }
    for (const TensorRange& named : model->Ranges()) {
      const auto decay = decays.find(named.values.unsafeGetTensorImpl());
      const bool is_trained = named.name != "head.bias";
      EXPECT_EQ(decay != decays.end(), is_trained) << named.name;
      if (!is_trained) continue;
      EXPECT_EQ(decay->second, named.sizes.size() > 1 ? 0.1 : 0) << named.name;
    }
    return absl::OkStatus();
  }));
}

struct StepOptions
    : public torch::optim::OptimizerCloneableOptions<StepOptions> {
  explicit StepOptions(double lr) : lr(lr) {}
  double get_lr() const override { return lr; }
  void set_lr(double value) override { lr = value; }
  double lr;
};

// A user's optimizer. A step subtracts `Rule()(optimizer, parameter)` times the
// rate.
template <typename Rule>
class Stepper : public torch::optim::Optimizer {
 public:
  explicit Stepper(std::vector<at::Tensor> parameters, double lr = 0.1)
      : Optimizer(std::move(parameters), std::make_unique<StepOptions>(lr)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const c10::NoGradGuard no_grad;
    ++steps;
    for (auto& group : param_groups()) {
      const double lr = group.options().get_lr();
      for (at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        parameter.sub_(Rule()(*this, parameter), lr);
      }
    }
    return {};
  }
  int steps = 0;  // a member that no state dict knows
};

struct Sign {
  template <typename Optimizer>
  at::Tensor operator()(Optimizer& optimizer, const at::Tensor& p) const {
    return p.grad().sign() / optimizer.steps;
  }
};
struct Lamb {  // by the norms of a parameter
  template <typename Optimizer>
  at::Tensor operator()(Optimizer&, const at::Tensor& p) const {
    return p.grad() * (p.norm() / p.grad().norm());
  }
};
struct Adafactor {  // factored for matrices
  template <typename Optimizer>
  at::Tensor operator()(Optimizer&, const at::Tensor& p) const {
    const at::Tensor square = p.grad().square();
    return p.grad() /
           (p.dim() == 2 ? square.mean(1, /*keepdim=*/true) : square).sqrt();
  }
};
struct Muon {  // for matrices alone
  template <typename Optimizer>
  at::Tensor operator()(Optimizer&, const at::Tensor& p) const {
    return p.grad().mm(p.grad().t()).mm(p.grad());
  }
};
struct ByGlobalNorm {
  template <typename Optimizer>
  at::Tensor operator()(Optimizer& optimizer, const at::Tensor& p) const {
    double sum = 0;
    for (const at::Tensor& one : optimizer.param_groups()[0].params()) {
      sum += one.grad().square().sum().template item<double>();
    }
    return p.grad() / std::sqrt(sum);
  }
};
struct Langevin {  // noise, but element by element
  template <typename Optimizer>
  at::Tensor operator()(Optimizer&, const at::Tensor& p) const {
    return p.grad() + at::randn_like(p);
  }
};

// Expects the finding of MakeOptimizer() and CheckOptimizer(), of the latter
// also while the rate is 0.
template <typename Rule>
void ExpectProbed(const std::string& finding) {
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    const auto expected =
        StatusIs(Code::kInvalidArgument,
                 AllOf(HasSubstr("Stepper"), HasSubstr(finding)));
    const absl::Status made = TorchToStatus(
        "making", [&] { MakeOptimizer<Stepper<Rule>>(*model, 0.1); });
    Stepper<Rule> optimizer(model->Parameters(), 0.0);
    absl::Status checked = CheckOptimizer(*model, optimizer);
    if (finding.empty()) {
      FSDP_RETURN_IF_ERROR(made);
      return checked;
    }
    EXPECT_THAT(made, expected);
    EXPECT_THAT(checked, expected);
    return absl::OkStatus();
  }));
}

TEST(ProbeOptimizerTest, FindsWhatIsNotElementByElement) {
  ExpectProbed<Lamb>("otherwise than the whole");
  ExpectProbed<Adafactor>("otherwise than the whole");
  ExpectProbed<Muon>("fails on a piece of a parameter");
}

TEST(ProbeOptimizerTest, ElementWiseOnesPass) {
  ExpectProbed<Sign>("");
  ExpectProbed<Langevin>("");
}

TEST(ProbeOptimizerTest, FindsWhatDependsOnOtherParameters) {
  ExpectProbed<ByGlobalNorm>("where there are others");
}

// Covers torch::optim's classes, whose states, groups and gradients stay, and a
// subclass, because classes themselves are not looked at.
TEST(ProbeOptimizerTest, LeavesTheOptimizerAsItWas) {
  struct Subclass : public torch::optim::AdamW {
    using AdamW::AdamW;
  };
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool probes : {false, true}) {
      FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
      Subclass optimizer(model->Parameters(), torch::optim::AdamWOptions(1e-2));
      const at::Tensor x = Rows(0, 4, kDim);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
        if (probes) FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer));
        optimizer.step();
      }
      results.emplace_back();
      for (const at::Tensor& shard : model->Parameters()) {
        results.back().push_back(shard.detach().clone());
      }
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      if (at::equal(results[0][i], results[1][i])) continue;
      return absl::InternalError(absl::StrCat("parameter ", i, " differs"));
    }
    return absl::OkStatus();
  }));
}

// `check` makes an optimizer for a sharded net and returns the status of
// CheckOptimizer().
template <typename Check>
void ExpectRefused(Check check, Code code, const std::string& text) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
        return check(model);
      });
  EXPECT_THAT(statuses, Each(StatusIs(code, HasSubstr(text))));
  EXPECT_THAT(statuses, Each(statuses.front()));
}

TEST(CheckOptimizerTest, RefusesLbfgsAndOtherShardsThanEachOnce) {
  ExpectRefused(
      [](Model& model) {
        torch::optim::LBFGS optimizer(model->Parameters());
        return CheckOptimizer(*model, optimizer);
      },
      Code::kInvalidArgument, "the optimizer is LBFGS");
  ExpectRefused(
      [](Model& model) {
        SGD optimizer(model->Parameters(), 0.1);
        optimizer.add_param_group(
            torch::optim::OptimizerParamGroup({model->Parameters()[1]}));
        return CheckOptimizer(*model, optimizer);
      },
      Code::kInvalidArgument,
      "as parameter 1 of group 0 and as parameter 0 of group 1");
  ExpectRefused(
      [](Model& model) {
        std::vector<at::Tensor> tensors = model->Parameters();
        tensors.push_back(at::Tensor(tensors[0].detach().clone()));
        SGD optimizer(tensors, 0.1);
        OptimizerCheckOptions options;
        options.allow_others = true;
        FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer, options));
        return CheckOptimizer(*model, optimizer);
      },
      Code::kInvalidArgument, "is no shard of this model");
  ExpectRefused(
      [](Model& model) {
        SGD optimizer({model->Parameters()[0]}, 0.1);
        return CheckOptimizer(*model, optimizer);
      },
      Code::kInvalidArgument, "7 trainable parameters are in no group");
}

TEST(CheckOptimizerTest, RefusesAnOptimizerThatWasMadeBeforeSharding) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& world) -> absl::Status {
        auto net = MakeNet(kDim, 1);
        SGD optimizer(net->parameters(), 0.1);
        Options options = BlockUnits();
        options.checks.outside_references = false;
        FSDP_ASSIGN_OR_RETURN(Model model,
                              FullyShard(net, Unowned(world), options));
        return CheckOptimizer(*model, optimizer);
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kFailedPrecondition,
                            AllOf(HasSubstr("parameter 0 of group 0"),
                                  HasSubstr("the module's own embed.weight"),
                                  HasSubstr("after sharding")))));
}

TEST(CheckOptimizerTest, AcceptsWhatShardingHasIgnored) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
      return name == "head.bias";
    };
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world, options));
    std::vector<at::Tensor> tensors = model->Parameters();
    tensors.push_back(model.module()->head->bias);
    SGD optimizer(tensors, 0.1);
    return CheckOptimizer(*model, optimizer);
  }));
}

TEST(CheckOptimizerTest, WarnsOfTrainableShardsOrAcceptsThem) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardNet(world));
    SGD optimizer({model->Parameters()[0]}, 0.1);
    Warnings warnings;
    c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    OptimizerCheckOptions options;
    options.missing = Missing::kAccept;
    FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer, options));
    if (!warnings.text().empty()) return absl::InternalError(warnings.text());
    options.missing = Missing::kWarn;
    FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer, options));
    const bool warned =
        warnings.text().find("7 trainable parameters") != std::string::npos;
    return warned ? absl::OkStatus() : absl::InternalError(warnings.text());
  }));
}

}  // namespace
}  // namespace fsdp::testing
