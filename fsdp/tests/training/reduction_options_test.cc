// How gradients are accumulated and reduced: NoSync(), hooks, divisors, and
// communicators that prefer scaled inputs. KnownProgramTest has many orders of
// backwards.
#include <torch/optim/sgd.h>

#include <set>
#include <stdexcept>

#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;

using Model = FullyShardedDataParallel<NetImpl>;
using Started = absl::StatusOr<std::unique_ptr<comm::Work>>;

absl::StatusOr<Model> MakeModel(Communicator& world) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits());
}

at::Tensor LossOn(const Forwarding& forward, int turn, int rank) {
  const at::Tensor x = InputOf(rank, Rows(int64_t{2} * turn, 2, kDim));
  return Loss(forward(x), x);
}

// Runs backwards, of which the first has the number `turn`: 'S' synchronizes,
// 'N' does not.
absl::Status RunTurns(Model& model, const std::string& text, int turn = 0) {
  for (const char c : text) {
    std::optional<NoSyncScope> no_sync;
    if (c == 'N') no_sync.emplace(model->NoSync());
    FSDP_RETURN_IF_ERROR(model->Backward(
        LossOn([&](const at::Tensor& x) { return model->forward(x); }, turn++,
               model->communicator().rank())));
  }
  return absl::OkStatus();
}

// Checks that gradients are those of the first backwards with plain LibTorch.
absl::Status CheckSumOf(Model& model, int backwards, double factor = 1) {
  std::vector<std::shared_ptr<NetImpl>> nets;
  for (int rank = 0; rank < model->communicator().world_size(); ++rank) {
    const auto net = nets.emplace_back(MakeNet(kDim, 2));
    for (int turn = 0; turn < backwards; ++turn) {
      LossOn([&](const at::Tensor& x) { return net->forward(x); }, turn, rank)
          .backward();
    }
  }
  Gradients means = MeansOf(nets);
  for (auto& [name, mean] : means) mean.mul_(factor);
  return CheckOwnGradients(*model, means);
}

TEST(NoSyncTest, ScopesNest) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    {
      NoSyncScope outer = model->NoSync();
      { NoSyncScope inner = model->NoSync(); }
      FSDP_RETURN_IF_ERROR(RunTurns(model, "S"));  // not after all
    }
    FSDP_RETURN_IF_ERROR(CheckOwnGradients(*model, {}));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S", /*turn=*/1));
    return CheckSumOf(model, 2);
  }));
}

TEST(ZeroGradTest, OfAnOptimizerKeepsWhatIsWholeThatOfTheModelDropsIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    FSDP_RETURN_IF_ERROR(RunTurns(model, "N"));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S", /*turn=*/1));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NN"));
    model->zero_grad();
    EXPECT_EQ(model->memory_stats().gradients.in_use_bytes, 0);
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S"));
    return CheckSumOf(model, 1);
  }));
}

TEST(DivideFactorsTest, MayChangeBetweenSteps) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(4, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NS"));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 2, 2.0 / 8));
    model->zero_grad();
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(1, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NS"));
    return CheckSumOf(model, 2);
  }));
}

TEST(ReductionHookTest, RunsOncePerReductionAlsoForGradientsKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    std::map<std::string, int> calls;
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks([&](const ReduceScatterCall& call) -> Started {
          ++calls[call.unit];
          return call.group.ReduceScatter(call.own, call.whole,
                                          comm::ReduceOp::kSum, call.unit);
        }));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NNS"));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 3));
    const std::map<std::string, int> once = {
        {"root", 1}, {"blocks.0", 1}, {"blocks.1", 1}};
    return CheckThat(calls, Eq(once), "reductions of units");
  }));
}

TEST(ReductionHookTest, WhatItThrowsEndsTheBackwardWithItsText) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks([](const ReduceScatterCall&) -> Started {
          throw std::runtime_error("my compressor");
        }));
    return RunTurns(model, "S");
  };
  EXPECT_THAT(RunRanks(2, run),
              Each(::testing::Property(&absl::Status::message,
                                       HasSubstr("my compressor"))));
}

TEST(ReductionHookTest, CompressedReductionsTrainAlikeWithAndWithoutReplicas) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kHybridShard}) {
    EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      Options options = BlockUnits();
      options.unit.strategy = strategy;
      TrainingTask task = ToyTask();
      task.optimizer = Sgd();
      task.prepare = [](ShardedModuleBase& model) {
        return model.SetReductionHooks(CompressedReduceScatter(at::kBFloat16),
                                       CompressedAllReduce(at::kBFloat16));
      };
      FSDP_RETURN_IF_ERROR(CheckToy(task, mesh, options,
                                    /*relative=*/0.02,
                                    /*absolute=*/0.005));
      // Rounding shows that the hooks were called.
      return CheckToy(task, mesh, options, 1e-7, 1e-8).ok()
                 ? absl::InternalError("nothing was rounded")
                 : absl::OkStatus();
    }));
  }
}

TEST(ReductionHookTest, AreSetOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks(CompressedReduceScatter(at::kHalf)));
    return CheckRefused(
        model->SetReductionHooks(CompressedReduceScatter(at::kHalf)), "");
  }));
}

// --- Scaled inputs -----------------------------------------------------------

constexpr int kRanks = 4;

// If scaled inputs are preferred, gradients are divided before they are summed,
// and exactly once: with four ranks a quarter is exact, so the bits are those
// of a division afterwards. Records what it is asked for.
class Preferring final : public comm::ForwardingCommunicator {
 public:
  Preferring(std::shared_ptr<Communicator> base, bool scaled_inputs,
             std::set<double>* scales)
      : ForwardingCommunicator(std::move(base)),
        scaled_inputs_(scaled_inputs),
        scales_(scales) {}

  bool PrefersScaledInputs() const override { return scaled_inputs_; }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    FSDP_ASSIGN_OR_RETURN(auto part, base().Split(color, key));
    return std::make_unique<Preferring>(std::move(part), scaled_inputs_,
                                        scales_);
  }

 private:
  comm::StartedWork DoScaledSum(const comm::CollectiveArgs& args,
                                absl::string_view label) override {
    scales_->insert(args.scaled->scale);
    return base().StartCollective(args, label);
  }

  const bool scaled_inputs_;
  std::set<double>* const scales_;
};

struct Training {
  std::string name;
  std::function<void(Options&)> configure = nullptr;
  std::function<absl::Status(Model&, const std::function<at::Tensor()>& loss)>
      run = [](Model& model, const std::function<at::Tensor()>& loss) {
        return model->Backward(loss());
      };
  std::set<double> scales = {1};  // if scaled inputs are preferred
};

absl::StatusOr<Gradients> Train(Communicator& world, const Training& training,
                                bool scaled_inputs, std::set<double>& scales) {
  FSDP_ASSIGN_OR_RETURN(
      const Mesh mesh, Mesh::Create(std::make_shared<Preferring>(
                                        Unowned(world), scaled_inputs, &scales),
                                    {{"replicate", -1}, {"shard", 2}}));
  Options options = BlockUnits();
  if (training.configure) training.configure(options);
  FSDP_ASSIGN_OR_RETURN(Model model,
                        FullyShard(MakeNet(kDim, 2), mesh, options));
  int64_t batch = world.rank();
  const auto loss = [&] {
    const at::Tensor x = Rows(3 * batch, 3, kDim);
    batch += kRanks;
    return Loss(model->forward(x), x);
  };
  FSDP_RETURN_IF_ERROR(training.run(model, loss));
  Gradients gradients;
  for (const TensorRange& named : model->Ranges()) {
    gradients[named.name] = named.values.grad();
  }
  return gradients;
}

absl::Status TwoBackwards(Model& model,
                          const std::function<at::Tensor()>& loss) {
  FSDP_RETURN_IF_ERROR(model->Backward(loss()));
  return model->Backward(loss());
}

absl::Status OneKeptWhole(Model& model,
                          const std::function<at::Tensor()>& loss) {
  {
    const auto no_sync = model->NoSync();
    FSDP_RETURN_IF_ERROR(model->Backward(loss()));
  }
  return TwoBackwards(model, loss);
}

absl::Status OneKeptAsSums(Model& model,
                           const std::function<at::Tensor()>& loss) {
  FSDP_RETURN_IF_ERROR(SetRequiresAllReduce(*model->module(), false));
  FSDP_RETURN_IF_ERROR(model->Backward(loss()));
  FSDP_RETURN_IF_ERROR(SetRequiresAllReduce(*model->module(), true));
  return model->Backward(loss());
}

absl::Status ByAHook(Model& model, const std::function<at::Tensor()>& loss) {
  FSDP_RETURN_IF_ERROR(model->SetReductionHooks(
      [](const ReduceScatterCall& call) {
        return call.group.ReduceScatter(call.own, call.whole,
                                        comm::ReduceOp::kSum, call.unit);
      },
      /*all_reduce=*/nullptr));
  return TwoBackwards(model, loss);
}

// Reduces gradients so small that fp16 loses bits of them, and more of their
// quarter.
absl::Status ByAHookInHalf(Model& model,
                           const std::function<at::Tensor()>& loss) {
  FSDP_RETURN_IF_ERROR(model->SetReductionHooks(
      CompressedReduceScatter(at::kHalf), /*all_reduce=*/nullptr));
  return model->Backward(loss() * 1e-5);
}

std::vector<Training> Trainings() {
  const auto hybrid = [](Options& options) {
    options.unit.strategy = ShardingStrategy::kHybridShard;
  };
  const auto reduce_in = [](at::ScalarType dtype) {
    return [dtype](Options& options) {
      options.unit.precision.reduce_dtype = dtype;
    };
  };
  const auto divide = [](std::optional<double> factor,
                         std::optional<double> before) {
    return [factor, before](Options& options) {
      options.gradients.divide_factor = factor;
      options.gradients.predivide_factor = before;
    };
  };
  const auto quantize = [](Options& options) {
    options.quantize.reduce = true;
    options.quantize.block = 8;
  };
  return {
      {"Once"},
      {"AddedUp", {}, TwoBackwards},
      {"KeptWhole", {}, OneKeptWhole},
      {"Hybrid", hybrid, OneKeptWhole, {}},
      {"SumsKept", hybrid, OneKeptAsSums, {}},
      {"Hook", {}, ByAHook, {}},
      {"HookInHalf", {}, ByAHookInHalf, {}},
      {"Quantized", quantize, TwoBackwards, {}},
      {"BFloat16", reduce_in(at::kBFloat16), OneKeptWhole},
      {"Half", reduce_in(at::kHalf), OneKeptWhole, {0.5}},
      // fp16 may not hold a sum, so that a half is divided before all the same.
      {"HalfDividedByTwo",
       [reduce_in, divide](Options& options) {
         reduce_in(at::kHalf)(options);
         divide(2, {})(options);
       },
       OneKeptWhole},
      {"DividedByTwo", divide(2, {}), OneKeptWhole},
      {"Sums", divide(1, {}), OneKeptWhole},
      {"PartBefore", divide({}, 2), OneKeptWhole, {0.5}},
      {"AllBefore", divide({}, 4), OneKeptWhole},
  };
}

class ScaledInputsTest : public ::testing::TestWithParam<Training> {};

TEST_P(ScaledInputsTest, GradientsAreThoseOfADivisionAfterwards) {
  const Training& training = GetParam();
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    std::set<double> scales_after;
    std::set<double> scales;
    FSDP_ASSIGN_OR_RETURN(const Gradients expected,
                          Train(world, training, false, scales_after));
    FSDP_ASSIGN_OR_RETURN(const Gradients actual,
                          Train(world, training, true, scales));
    EXPECT_EQ(scales, training.scales);
    EXPECT_THAT(actual.size(), AllOf(Eq(expected.size()), Gt(0U)));
    for (const auto& [name, gradient] : expected) {
      EXPECT_TRUE(actual.at(name).equal(gradient))
          << "the gradient of " << name;
    }
    return absl::OkStatus();
  }));
}

INSTANTIATE_TEST_SUITE_P(All, ScaledInputsTest,
                         ::testing::ValuesIn(Trainings()),
                         [](const auto& info) { return info.param.name; });

}  // namespace

}  // namespace fsdp::testing
