// Gradients over several backwards, with and without NoSync(), in any order.
#include <torch/optim/sgd.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int64_t kRows = 2;  // per rank and backward

// A layer, of a prime size, that is a unit.
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(int64_t hidden)
      : in(register_module("in", torch::nn::Linear(kDim, hidden))),
        out(register_module("out", torch::nn::Linear(hidden, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + out->forward(in->forward(x).tanh());
  }
  torch::nn::Linear in;
  torch::nn::Linear out;
};

// Has units with frozen and tied parameters, one that some backwards use and
// one that none does.
class TestNet : public torch::nn::Module {
 public:
  TestNet()
      : first(register_module("first", std::make_shared<LayerImpl>(5))),
        sometimes(register_module("sometimes", std::make_shared<LayerImpl>(1))),
        never(register_module("never", std::make_shared<LayerImpl>(3))),
        head(register_module("head", torch::nn::Linear(kDim, kDim))),
        tied(register_parameter("tied", head->weight)) {
    FillParameters(*this, 3);
    first->in->bias.set_requires_grad(false);
    head->bias.set_requires_grad(false);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(first, x);
    if (uses_all) y = Forward(sometimes, y);
    return head->forward(y).tanh().matmul(tied);
  }

  std::shared_ptr<LayerImpl> first;
  std::shared_ptr<LayerImpl> sometimes;
  std::shared_ptr<LayerImpl> never;
  torch::nn::Linear head;
  at::Tensor tied;
  bool uses_all = true;
};

using Model = FullyShardedDataParallel<TestNet>;
using Gradients = std::map<std::string, at::Tensor>;

Options Units() { return UnitsOf<LayerImpl>(); }

at::Tensor LossOn(TestNet& net, const std::function<at::Tensor(at::Tensor)>& f,
                  int64_t index, int64_t rows, bool uses_all) {
  net.uses_all = uses_all;
  const at::Tensor x = Rows(index * kRows, rows, kDim);
  return (f(x) - x.tanh()).square().mean();
}

// One backward of a step: 'S' and 's' synchronize, 'N' and 'n' do not. Capital
// letters use all units but one; small ones leave out another one.
struct Backward {
  bool synchronizes;
  bool uses_all;
};

std::vector<Backward> Parse(const std::string& text) {
  std::vector<Backward> backwards;
  for (const char c : text) {
    backwards.push_back({c == 'S' || c == 's', c == 'S' || c == 'N'});
  }
  return backwards;
}

// Returns means over all ranks' rows, summed over backwards.
Gradients PlainGradients(const std::string& text, int world_size) {
  TestNet net;
  int64_t part = 0;
  for (const Backward& backward : Parse(text)) {
    LossOn(
        net, [&](const at::Tensor& x) { return net.forward(x); },
        part * world_size, kRows * world_size, backward.uses_all)
        .backward();
    ++part;
  }
  Gradients gradients;
  for (const auto& item : net.named_parameters()) {
    gradients[item.key()] = item.value().grad();
  }
  return gradients;
}

absl::Status RunBackwards(Model& model, const std::string& text,
                          int64_t first_part = 0) {
  const comm::Communicator& world = model->communicator();
  int64_t part = first_part;
  for (const Backward& backward : Parse(text)) {
    std::optional<NoSyncScope> no_sync;
    if (!backward.synchronizes) no_sync.emplace(model->NoSync());
    const at::Tensor loss = LossOn(
        *model.module(), [&](const at::Tensor& x) { return model->forward(x); },
        part * world.world_size() + world.rank(), kRows, backward.uses_all);
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    ++part;
  }
  return absl::OkStatus();
}

absl::Status CheckGradients(Model& model, const Gradients& expected,
                            double factor = 1, double relative = 1e-4) {
  SummonOptions options;
  options.with_grads = true;
  options.writeback = false;
  FSDP_ASSIGN_OR_RETURN(FullParamsScope full, model->SummonFullParams(options));
  for (const auto& item : model.module()->named_parameters()) {
    const at::Tensor gradient = item.value().grad();
    const at::Tensor& wanted = expected.at(item.key());
    if (gradient.defined() != wanted.defined()) {
      return absl::InternalError(absl::StrCat(
          item.key(), wanted.defined() ? " has no" : " has a", " gradient"));
    }
    if (!wanted.defined()) continue;
    EXPECT_TRUE(at::allclose(gradient, wanted * factor, relative, 1e-6))
        << "the gradient of " << item.key() << " is "
        << (gradient - wanted * factor).abs().max().item<float>() << " off";
  }
  return full.Close();
}

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const Options& options = Units()) {
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  return FullyShard(std::make_shared<TestNet>(), mesh, options);
}

class OrderTest : public ::testing::TestWithParam<ShardingStrategy> {};

TEST_P(OrderTest, OfBackwardsWithAndWithoutSynchronizationIsOfNoMatter) {
  const std::vector<std::string> orders = {
      "S",   "NS",  "SS", "SNS",  "NNS",  "NSNS", "SNNS", "SSNS", "Ns",
      "sNs", "nNs", "nS", "NsnS", "NnSs", "ns",   "nNsS", "SnSs", "NSnsNs"};
  for (const int world_size : {1, 3, 4}) {
    EXPECT_OK(RunAllRanks(
        world_size,
        [&](Communicator& world) -> absl::Status {
          Options options = Units();
          options.unit.strategy = GetParam();
          FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
          for (const std::string& order : orders) {
            model->zero_grad();
            absl::Status status = RunBackwards(model, order);
            if (status.ok()) {
              status = CheckGradients(
                  model, PlainGradients(order, world.world_size()));
            }
            EXPECT_TRUE(status.ok()) << order << ": " << status.message();
          }
          return absl::OkStatus();
        }))
        << world_size << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(All, OrderTest, ::testing::ValuesIn(kStrategies),
                         [](const auto& info) {
                           return absl::StrCat("Strategy", info.index);
                         });

TEST(NoSyncTest, LeavesTheShardsGradientsAloneUntilTheNextSynchronization) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "SNN"));
    FSDP_RETURN_IF_ERROR(CheckGradients(model, PlainGradients("S", 2)));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "S", /*first_part=*/3));
    return CheckGradients(model, PlainGradients("SNNS", 2));
  }));
}

TEST(NoSyncTest, ScopesNest) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    {
      NoSyncScope outer = model->NoSync();
      { NoSyncScope inner = model->NoSync(); }
      FSDP_RETURN_IF_ERROR(RunBackwards(model, "S"));  // not after all
    }
    for (const TensorRange& named : model->Ranges()) {
      if (named.values.grad().defined()) {
        return absl::InternalError("the inner scope has ended the outer one");
      }
    }
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "S", /*first_part=*/1));
    return CheckGradients(model, PlainGradients("NS", 2));
  }));
}

// Between the backwards of a step come an evaluation and full parameters.
TEST(NoSyncTest, OutlivesWhatElseIsDoneWithTheModel) {
  for (const ShardingStrategy strategy : kStrategies) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      Options options = Units();
      options.unit.strategy = strategy;
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
      FSDP_RETURN_IF_ERROR(RunBackwards(model, "N"));
      {
        c10::NoGradGuard no_grad;
        model->forward(Rows(0, 1, kDim));
      }
      { FSDP_RETURN_IF_ERROR(model->SummonFullParams().status()); }
      FSDP_RETURN_IF_ERROR(RunBackwards(model, "S", /*first_part=*/1));
      return CheckGradients(model, PlainGradients("NS", 2));
    }));
  }
}

// --- zero_grad ---------------------------------------------------------------

TEST(ZeroGradTest, OfAnOptimizerKeepsWhatIsWholeThatOfTheModelDropsIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "N"));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "S", /*first_part=*/1));
    FSDP_RETURN_IF_ERROR(CheckGradients(model, PlainGradients("NS", 2)));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "NN"));
    model->zero_grad();
    EXPECT_EQ(model->memory_stats().gradients.in_use_bytes, 0);
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "s"));
    return CheckGradients(model, PlainGradients("s", 2));
  }));
}

// --- Factors, hooks ----------------------------------------------------------

TEST(DivideFactorsTest, HoldForGradientsKeptWholeAsWell) {
  struct Case {
    std::optional<double> divide;
    std::optional<double> predivide;
    at::ScalarType reduce;
    double factor;  // of the mean
  };
  const Case cases[] = {
      {{}, 2.0, at::kFloat, 1},   {{}, 3.0, at::kFloat, 1},
      {1.0, {}, at::kFloat, 3},   {12.0, {}, at::kFloat, 0.25},
      {1.0, 4.0, at::kFloat, 3},  {{}, {}, at::kHalf, 1},
      {6.0, 2.0, at::kHalf, 0.5}, {{}, {}, at::kBFloat16, 1}};
  for (const Case& c : cases) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      Options options = Units();
      options.gradients.divide_factor = c.divide;
      options.gradients.predivide_factor = c.predivide;
      options.unit.precision.reduce_dtype = c.reduce;
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
      FSDP_RETURN_IF_ERROR(RunBackwards(model, "NnS"));
      return CheckGradients(model, PlainGradients("NnS", 3), c.factor,
                            c.reduce == at::kFloat ? 1e-4 : 0.05);
    }));
  }
}

TEST(DivideFactorsTest, MayChangeBetweenSteps) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(4, 2));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "NS"));
    FSDP_RETURN_IF_ERROR(
        CheckGradients(model, PlainGradients("NS", 2), 2.0 / 8));
    model->zero_grad();
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(1, 2));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "NS"));
    return CheckGradients(model, PlainGradients("NS", 2));
  }));
}

TEST(ReductionHookTest, RunsOncePerReductionAlsoForGradientsKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    std::map<std::string, int> calls;
    FSDP_RETURN_IF_ERROR(model->SetReductionHooks(
        [&](const ReduceScatterCall& call)
            -> absl::StatusOr<std::unique_ptr<comm::Work>> {
          ++calls[call.unit];
          return call.group.ReduceScatter(call.own, call.whole,
                                          comm::ReduceOp::kSum, call.unit);
        }));
    FSDP_RETURN_IF_ERROR(RunBackwards(model, "NNs"));
    FSDP_RETURN_IF_ERROR(CheckGradients(model, PlainGradients("NNs", 2)));
    for (const auto& [unit, count] : calls) {
      EXPECT_EQ(count, 1) << unit;
    }
    return CheckThat(calls, SizeIs(3), "units that were reduced");
  }));
}

TEST(ReductionHookTest, WhatItThrowsEndsTheBackwardWithItsText) {
  EXPECT_THAT(
      RunRanks(2,
               [](Communicator& world) -> absl::Status {
                 FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
                 FSDP_RETURN_IF_ERROR(model->SetReductionHooks(
                     [](const ReduceScatterCall&)
                         -> absl::StatusOr<std::unique_ptr<comm::Work>> {
                       throw std::runtime_error("my compressor");
                     }));
                 return RunBackwards(model, "S");
               }),
      ::testing::Each(::testing::Property(
          &absl::Status::message, ::testing::HasSubstr("my compressor"))));
}

}  // namespace
}  // namespace fsdp::testing
