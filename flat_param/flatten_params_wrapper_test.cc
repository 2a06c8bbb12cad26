#include "flat_param/flatten_params_wrapper.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <sstream>
#include <stdexcept>

#include "base/testing/status_matchers.h"
#include "flat_param/testing/tied_net.h"

namespace fsdp::flat_param::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

// --- What fairscale's test_flatten_params_wrapper tests ---------------------

TEST(FlattenParamsTest, FlatParamHoldsEveryElementOfTiedParametersOnce) {
  const auto net = FlatNet();
  EXPECT_EQ(net->flat_param().numel(), kNumElements);
  EXPECT_EQ(net->flat_param().dim(), 1);
  EXPECT_TRUE(net->flat_param().is_leaf());
  EXPECT_TRUE(net->flat_param().requires_grad());
  EXPECT_TRUE(net->flat_param().equal(FlatValues(*MakeTiedNet())));
  EXPECT_EQ(net->num_params_managed(), kNumParameters);
  EXPECT_EQ(net->layout().numel(), kNumElements);
  EXPECT_EQ(net->layout().parameter(0).name, "fc.weight");
  EXPECT_EQ(net->layout().parameter(0).sizes,
            (std::vector<int64_t>{kDim, kDim}));
}

TEST(FlattenParamsTest, OutputsAndBuffersEqualTheUnwrappedModules) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  for (const bool train : {true, false}) {
    plain->train(train);
    net->train(train);
    EXPECT_EQ(net.module()->is_training(), train);
    EXPECT_TRUE(net->forward(Input()).equal(plain->forward(Input())));
  }
  EXPECT_TRUE(
      net.module()->norm->running_mean.equal(plain->norm->running_mean));
}

template <typename Optimizer, typename OptimizerOptions>
void ExpectSameTraining(const OptimizerOptions& options) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  Optimizer plain_optimizer(DistinctParameters(*plain), options);
  Optimizer flat_optimizer(net->parameters(), options);
  for (int step = 0; step < 4; ++step) {
    plain->forward(Input()).square().sum().backward();
    net->forward(Input()).square().sum().backward();
    EXPECT_TRUE(net->flat_param().grad().equal(FlatGradient(*plain)));
    plain_optimizer.step();
    flat_optimizer.step();
    EXPECT_TRUE(net->flat_param().equal(FlatValues(*plain))) << step;
    if (step == 1) continue;  // accumulates once
    plain_optimizer.zero_grad();
    flat_optimizer.zero_grad();
    EXPECT_FALSE(net->flat_param().grad().defined());
  }
}

TEST(FlattenParamsTest, TrainingStepsEqualTheUnwrappedModules) {
  ExpectSameTraining<torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  ExpectSameTraining<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
}

// Notes what its parameter is while it runs.
class ManyArguments : public torch::nn::Module {
 public:
  ManyArguments()
      : weight(register_parameter("weight", at::arange(6.f).view({2, 3}))) {}
  std::pair<at::Tensor, std::string> forward(const at::Tensor& x, double scale,
                                             std::unique_ptr<at::Tensor> added,
                                             std::string& written,
                                             int times = 3) {
    is_view = !weight.is_leaf() && weight.grad_fn() != nullptr;
    seen = weight.detach().clone();
    written = "in forward";
    return {weight.matmul(x) * scale + *added, std::string(times, 'x')};
  }
  at::Tensor weight;
  at::Tensor seen;
  bool is_view = false;
};

TEST(FlattenParamsTest, ForwardMakesViewsThenHandsAllArgumentsOn) {
  const auto module = std::make_shared<ManyArguments>();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module));
  ManyArguments plain;
  const at::Tensor x = at::tensor({1.f, -2.f, 4.f});
  const auto call = [&x](auto& called, auto... more) {
    std::string written;
    const auto [y, note] = called.forward(
        x, 0.5, std::make_unique<at::Tensor>(at::ones({2})), written, more...);
    EXPECT_EQ(written, "in forward");
    return std::make_pair(y, note);
  };
  for (const float value : {1.f, 2.f}) {
    {
      // An optimizer does this: the views of the forward before are stale.
      c10::NoGradGuard no_grad;
      net->flat_param().copy_(at::arange(6.f) * value);
      plain.weight.copy_((at::arange(6.f) * value).view({2, 3}));
    }
    const auto [y, note] = call(*net);
    EXPECT_TRUE(module->is_view);
    EXPECT_TRUE(module->seen.equal(plain.weight));
    EXPECT_TRUE(y.equal(call(plain).first));
    EXPECT_EQ(note, "xxx");
    EXPECT_EQ(call(*net, 1).second, "x");
    y.sum().backward();
    call(plain).first.sum().backward();
  }
  EXPECT_TRUE(net->flat_param().grad().equal(plain.weight.grad().view({-1})));
}

TEST(FlattenParamsTest, APartOfTheParametersIsFlattenedAndTheRestIsLeft) {
  const auto module = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module, Only("blocks.")));
  EXPECT_EQ(net->flat_param().numel(), 60);
  EXPECT_THAT(module->blocks->parameters(), IsEmpty());
  EXPECT_EQ(module->fc->parameters().size(), 2);
  EXPECT_THAT(Names(*net),
              ElementsAre("flat_param", "module.fc.weight", "module.fc.bias",
                          "module.norm.weight", "module.norm.bias",
                          "module.head.weight", "module.head.bias"));
  const auto plain = MakeTiedNet();
  plain->forward(Input()).sum().backward();
  net->forward(Input()).sum().backward();
  EXPECT_TRUE(module->fc->weight.grad().equal(plain->fc->weight.grad()));
  EXPECT_TRUE(net->flat_param().grad().narrow(0, 0, 25).equal(
      plain->blocks->parameters()[0].grad().reshape({-1})));

  net->to(at::kDouble);
  EXPECT_EQ(net->flat_param().scalar_type(), at::kDouble);
  EXPECT_EQ(module->fc->weight.scalar_type(), at::kDouble);
  EXPECT_EQ(net->forward(Input().to(at::kDouble)).scalar_type(), at::kDouble);
}

TEST(FlattenParamsTest, TiedParametersAreFlattenedAtAllPlacesIfAtOne) {
  const auto module = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module, Only("head.weight")));
  EXPECT_EQ(net->num_params_managed(), 1);
  EXPECT_THAT(Names(*module->fc), ElementsAre("bias"));
  EXPECT_THAT(Names(*module->head), ElementsAre("bias"));
}

TEST(FlattenParamsTest, TwoGroupsAreTwoWrappersAroundOneAnother) {
  const auto plain = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto inner,
                       FlattenParams(MakeTiedNet(), Only("blocks.")));
  ASSERT_OK_AND_ASSIGN(auto outer, FlattenParams(inner));
  EXPECT_THAT(Names(*outer), ElementsAre("flat_param", "module.flat_param"));
  EXPECT_EQ(outer->layout().parameter(0).name, "fc.weight");
  EXPECT_EQ(outer->flat_param().numel() + inner->flat_param().numel(),
            kNumElements);
  EXPECT_TRUE(outer->forward(Input()).equal(plain->forward(Input())));
  plain->forward(Input()).sum().backward();
  outer->forward(Input()).sum().backward();
  EXPECT_TRUE(outer->flat_param().grad().narrow(0, 0, 25).equal(
      plain->fc->weight.grad().reshape({-1})));
  EXPECT_TRUE(inner->flat_param().grad().narrow(0, 0, 25).equal(
      plain->blocks->parameters()[0].grad().reshape({-1})));
}

TEST(FlattenParamsTest, NothingSelectedLeavesTheModuleAsItIs) {
  const auto plain = MakeTiedNet();
  const auto module = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module, Only("none")));
  EXPECT_FALSE(net->has_params());
  EXPECT_FALSE(net->flat_param().defined());
  EXPECT_EQ(Names(*module), Names(*plain));
  EXPECT_TRUE(net->forward(Input()).equal(plain->forward(Input())));
  const auto scope = net->UnflattenAsParams();
  EXPECT_EQ(Names(*module), Names(*plain));
}

TEST(FlattenParamsTest, AModuleWithoutParametersIsOnlyCalled) {
  ASSERT_OK_AND_ASSIGN(
      auto net, FlattenParams(torch::nn::Sequential(torch::nn::Identity())));
  EXPECT_THAT(net->parameters(), IsEmpty());
  EXPECT_FALSE(net->flat_param().defined());
  EXPECT_EQ(net->num_params_managed(), 0);
  EXPECT_EQ(net->layout().numel(), 0);
  EXPECT_TRUE(net->forward(Input()).equal(Input()));
  EXPECT_OK(net->SetFlatData(at::empty({0})));
}

// --- Where parameters are ---------------------------------------------------

TEST(FlattenParamsTest, MembersOfTheModuleLookIntoTheFlatParameter) {
  const auto module = MakeTiedNet();
  const auto* weight = module->fc->weight.unsafeGetTensorImpl();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module));
  EXPECT_EQ(module->fc->weight.unsafeGetTensorImpl(), weight);
  EXPECT_TRUE(module->fc->weight.is_alias_of(net->flat_param()));
  EXPECT_FALSE(module->fc->weight.is_leaf());
  c10::NoGradGuard no_grad;
  net->flat_param().fill_(7);
  EXPECT_TRUE(module->fc->weight.equal(at::full({kDim, kDim}, 7.f)));
}

TEST(FlattenParamsTest, IndexingReachesTheWrappedContainer) {
  ASSERT_OK_AND_ASSIGN(
      auto net, FlattenParams(torch::nn::Sequential(torch::nn::Linear(2, 3),
                                                    torch::nn::Linear(3, 2))));
  EXPECT_EQ(net[1], net.module()->ptr(1));
  EXPECT_EQ((*net)[0], net.module()->ptr(0));
}

TEST(FlattenParamsTest, TransposedAndChannelsLastParametersKeepTheirStrides) {
  class Strided : public torch::nn::Module {
   public:
    Strided()
        : a(register_parameter("a", at::arange(6.f).view({2, 3}).t())),
          b(register_parameter(
              "b", at::arange(24.f)
                       .view({2, 3, 2, 2})
                       .contiguous(at::MemoryFormat::ChannelsLast))),
          c(register_parameter("c", at::tensor(5.f))) {}
    at::Tensor forward() { return (a * a).sum() + (b * b).sum() + c; }
    at::Tensor a, b, c;
  };
  const Strided plain;
  auto module = std::make_shared<Strided>();
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module));
  EXPECT_EQ(module->a.strides(), plain.a.strides());
  EXPECT_EQ(module->b.strides(), plain.b.strides());
  EXPECT_TRUE(module->a.equal(plain.a));
  EXPECT_TRUE(module->b.equal(plain.b));
  net->forward().backward();
  EXPECT_TRUE(net->flat_param().grad().narrow(0, 0, 30).equal(
      2 * net->flat_param().detach().narrow(0, 0, 30)));
}

TEST(FlattenParamsTest, PrintingSaysHowMuchIsFlattened) {
  std::ostringstream stream;
  stream << FlatNet();
  EXPECT_THAT(stream.str(), HasSubstr("9 parameters, 105 elements"));
}

// --- Autograd ---------------------------------------------------------------

TEST(FlattenParamsTest, ChildrenMayBeCalledDirectly) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  plain->fc->forward(Input()).sum().backward();
  net.module()->fc->forward(Input()).sum().backward();
  const at::Tensor gradient = net->flat_param().grad();
  EXPECT_TRUE(
      gradient.narrow(0, 0, 25).equal(plain->fc->weight.grad().reshape({-1})));
  EXPECT_EQ(gradient.narrow(0, 30, kNumElements - 30).abs().sum().item<float>(),
            0)
      << "of unused parameters";
}

TEST(FlattenParamsTest, ForwardsMayPrecedeTheirBackwards) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  const auto run = [](auto& module) {
    const at::Tensor first = module->forward(Input(2)).sum();
    const at::Tensor second = module->forward(Input(3)).square().sum();
    first.backward();
    second.backward();
  };
  run(plain);
  run(net);
  EXPECT_TRUE(at::allclose(net->flat_param().grad(), FlatGradient(*plain)));
}

TEST(FlattenParamsTest, GradientsOfGradientsEqualTheUnwrappedModules) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  const auto penalty = [](const at::Tensor& output,
                          const std::vector<at::Tensor>& parameters) {
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& gradient : torch::autograd::grad(
             {output.square().sum()}, parameters, {}, true, true)) {
      sum = sum + gradient.square().sum();
    }
    return sum;
  };
  const at::Tensor expected =
      penalty(plain->forward(Input()), DistinctParameters(*plain));
  const at::Tensor actual = penalty(net->forward(Input()), {net->flat_param()});
  EXPECT_TRUE(at::allclose(actual, expected));
  expected.backward();
  actual.backward();
  EXPECT_TRUE(
      at::allclose(net->flat_param().grad(), FlatGradient(*plain), 1e-4, 1e-6));
}

TEST(FlattenParamsTest, SparseGradientsAreFlattened) {
  torch::nn::Embedding embedding(
      torch::nn::EmbeddingOptions(4, 2).sparse(true));
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(embedding));
  net->forward(at::tensor({1, 3, 1}, at::kLong)).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().equal(
      at::tensor({0.f, 0.f, 2.f, 2.f, 0.f, 0.f, 1.f, 1.f})));
}

TEST(FlattenParamsTest, WritingTheFlatParameterBeforeBackwardIsNoticed) {
  auto net = FlatNet();
  const at::Tensor loss = net->forward(Input()).sum();
  {
    c10::NoGradGuard no_grad;
    net->flat_param().mul_(2);
  }
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(FlattenParamsTest, AFrozenModuleMakesAFrozenFlatParameter) {
  const auto module = MakeTiedNet();
  for (const at::Tensor& parameter : module->parameters()) {
    parameter.set_requires_grad(false);
  }
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(module));
  EXPECT_FALSE(net->flat_param().requires_grad());
  const at::Tensor x = Input().requires_grad_();
  net->forward(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(net->flat_param().grad().defined());
}

TEST(FlattenParamsTest, RunsWithoutGradAndInInferenceMode) {
  auto net = FlatNet();
  net->eval();
  const at::Tensor expected = net->forward(Input()).detach();
  {
    c10::NoGradGuard no_grad;
    EXPECT_TRUE(net->forward(Input()).equal(expected));
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(net->forward(Input()).equal(expected));
  }
  net->forward(Input()).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().defined());
}

TEST(FlattenParamsTest, GradientsFromBeforeAreKept) {
  const auto plain = MakeTiedNet();
  plain->forward(Input()).sum().backward();
  const at::Tensor expected = FlatGradient(*plain);
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(plain));
  EXPECT_TRUE(net->flat_param().grad().equal(expected));
}

// --- Moving -----------------------------------------------------------------

TEST(FlattenParamsTest, FollowsAFlatParameterThatWasMoved) {
  const auto plain = MakeTiedNet(1);
  auto net = FlatNet();
  net->flat_param().set_data(FlatValues(*plain));
  EXPECT_TRUE(net->forward(Input()).equal(plain->forward(Input())));
  net->forward(Input()).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().defined());
  EXPECT_TRUE(net.module()->fc->weight.is_alias_of(net->flat_param()));
}

TEST(FlattenParamsTest, AParentConvertsTheWrappersInside) {
  torch::nn::Sequential outer(ValueOrThrow(FlattenParams(MakeTiedNet())));
  outer->to(at::kDouble);
  EXPECT_EQ(outer->parameters()[0].scalar_type(), at::kDouble);
  outer->forward(Input().to(at::kDouble)).sum().backward();
  EXPECT_EQ(outer->parameters()[0].grad().scalar_type(), at::kDouble);
  outer->to(at::kCPU, at::kFloat);
  EXPECT_EQ(outer->forward(Input()).scalar_type(), at::kFloat);
}

TEST(FlattenParamsTest, AModuleThatLooksItsParametersUpIsConverted) {
  torch::nn::LSTM plain(3, 5);
  auto net = ValueOrThrow(FlattenParams(torch::nn::LSTM(
      std::dynamic_pointer_cast<torch::nn::LSTMImpl>(plain->clone()))));
  plain->to(at::kDouble);
  net->to(at::kDouble);
  const at::Tensor x = at::ones({2, 1, 3}, at::kDouble);
  EXPECT_TRUE(
      at::equal(std::get<0>(net->forward(x)), std::get<0>(plain->forward(x))));
}

TEST(FlattenParamsTest, RefusesAFlatParameterThatNoLongerFits) {
  auto net = FlatNet();
  net->flat_param().set_data(at::zeros({kNumElements - 1}));
  EXPECT_THAT(TorchToStatus("call", [&] { net->forward(Input()); }),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr("[104]"), HasSubstr("105 elements"))));
}

TEST(FlattenParamsTest, RefusesAParameterWhoseDataWasReplaced) {
  auto net = FlatNet();
  net.module()->fc->weight.set_data(at::zeros({kDim, kDim}));
  EXPECT_THAT(TorchToStatus("call", [&] { net->forward(Input()); }),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr("fc.weight"), HasSubstr("replaced"))));
}

// --- Unflattening -----------------------------------------------------------

TEST(UnflattenAsParamsTest, ParametersAreRegisteredLeavesOverTheFlatOne) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  const at::Tensor flat = net->flat_param();
  {
    const auto scope = net->UnflattenAsParams();
    EXPECT_FALSE(net->flat_param().defined());
    EXPECT_TRUE(net->has_params());
    EXPECT_EQ(Names(*net.module()), Names(*plain)) << "and their order";
    for (const auto& item : net.module()->named_parameters()) {
      const at::Tensor expected = plain->named_parameters()[item.key()];
      EXPECT_TRUE(item.value().equal(expected)) << item.key();
      EXPECT_TRUE(item.value().is_leaf() && item.value().requires_grad());
      EXPECT_TRUE(item.value().is_alias_of(flat));
    }
    const auto pass_through = net->UnflattenAsParams();
    EXPECT_EQ(Names(*net.module()), Names(*plain));
  }
  EXPECT_TRUE(net->flat_param().is_same(flat));
  EXPECT_THAT(Names(*net), ElementsAre("flat_param"));
  EXPECT_FALSE(net.module()->fc->weight.is_leaf());
}

TEST(UnflattenAsParamsTest, WhatIsWrittenInsideLandsInTheFlatParameter) {
  auto net = FlatNet();
  {
    auto scope = net->UnflattenAsParams();
    c10::NoGradGuard no_grad;
    Fill(*net.module(), 1);
    net.module()->head->bias.set_data(at::full({kDim}, 3, at::kDouble));
    EXPECT_OK(scope.Close());
  }
  const auto plain = MakeTiedNet(1);
  plain->head->bias.detach().fill_(3);
  EXPECT_TRUE(net->flat_param().equal(FlatValues(*plain)));
  EXPECT_TRUE(net->forward(Input()).equal(plain->forward(Input())));
}

TEST(UnflattenAsParamsTest, ParametersMayBecomeViewsOfOneAnother) {
  auto net = FlatNet();
  const auto plain = MakeTiedNet();
  const at::Tensor bias = plain->head->bias.detach().clone();
  {
    auto scope = net->UnflattenAsParams();
    const c10::NoGradGuard no_grad;
    TiedNetImpl& inside = *net.module();
    inside.fc->weight.set_data(inside.fc->weight.detach().t());
    const at::Tensor other = inside.norm->bias.detach();
    inside.norm->bias.set_data(inside.head->bias.detach());
    inside.head->bias.set_data(other);
    EXPECT_OK(scope.Close());
  }
  plain->fc->weight.set_data(plain->fc->weight.detach().t().contiguous());
  plain->head->bias.set_data(plain->norm->bias.detach());
  plain->norm->bias.set_data(bias);
  EXPECT_TRUE(net->flat_param().equal(FlatValues(*plain)));
}

TEST(UnflattenAsParamsTest, GradientsGoInAndComeBack) {
  const auto plain = MakeTiedNet();
  auto net = FlatNet();
  plain->forward(Input()).sum().backward();
  net->forward(Input()).sum().backward();
  {
    const auto scope = net->UnflattenAsParams();
    EXPECT_TRUE(
        net.module()->norm->weight.grad().equal(plain->norm->weight.grad()));
    net->forward(Input()).sum().backward();
  }
  plain->forward(Input()).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().equal(FlatGradient(*plain)));
  {
    const auto scope = net->UnflattenAsParams();
    net->zero_grad();
  }
  EXPECT_FALSE(net->flat_param().grad().defined());
  {
    const auto scope = net->UnflattenAsParams();
    net.module()->fc->forward(Input()).sum().backward();
  }
  plain->zero_grad();
  plain->fc->forward(Input()).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().narrow(0, 0, 25).equal(
      plain->fc->weight.grad().reshape({-1})));
  EXPECT_FALSE(net.module()->fc->weight.grad().defined());
}

TEST(UnflattenAsParamsTest, AnExceptionRestoresTheFlatParameter) {
  auto net = FlatNet();
  try {
    const auto scope = net->UnflattenAsParams();
    throw std::runtime_error("thrown inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_THAT(Names(*net), ElementsAre("flat_param"));
  EXPECT_TRUE(net->flat_param().defined());
  net->forward(Input()).sum().backward();
  EXPECT_TRUE(net->flat_param().grad().defined());
}

TEST(UnflattenAsParamsTest, OtherFlatDataIsSeenInsideOnly) {
  auto net = FlatNet();
  const auto other = MakeTiedNet(1);
  const at::Tensor before = net->flat_param().detach().clone();
  {
    const auto scope = net->UnflattenAsParams(FlatValues(*other));
    EXPECT_TRUE(net.module()->blocks->parameters()[2].equal(
        other->blocks->parameters()[2]));
    EXPECT_TRUE(net->forward(Input()).equal(other->forward(Input())));
    net->forward(Input()).sum().backward();
  }
  EXPECT_TRUE(net->flat_param().equal(before));
  EXPECT_FALSE(net->flat_param().grad().defined());
  const auto plain = MakeTiedNet();
  EXPECT_TRUE(net.module()->fc->weight.equal(plain->fc->weight));
}

TEST(UnflattenAsParamsTest, RefusesOtherFlatDataThatDoesNotFit) {
  auto net = FlatNet();
  const auto error_of = [&net](const at::Tensor& data) {
    return TorchToStatus(
        "call", [&] { const auto scope = net->UnflattenAsParams(data); });
  };
  EXPECT_THAT(error_of(at::zeros({3})),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("105 elements"), HasSubstr("[3]"))));
  EXPECT_THAT(error_of(at::zeros({kNumElements}, at::kDouble)),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("Float"), HasSubstr("Double"))));
  EXPECT_THAT(
      error_of(at::zeros({2 * kNumElements}).slice(0, 0, std::nullopt, 2)),
      StatusIs(Code::kInvalidArgument, HasSubstr("strided")));
  EXPECT_THAT(Names(*net), ElementsAre("flat_param"));
}

TEST(UnflattenAsParamsTest, ConvertingInsideConvertsTheFlatParameter) {
  auto net = FlatNet();
  {
    const auto scope = net->UnflattenAsParams();
    net->to(at::kDouble);
    EXPECT_EQ(net.module()->fc->weight.scalar_type(), at::kDouble);
  }
  EXPECT_EQ(net->flat_param().scalar_type(), at::kDouble);
  EXPECT_TRUE(
      net->flat_param().to(at::kFloat).equal(FlatValues(*MakeTiedNet())));
}

TEST(UnflattenAsParamsTest, FreezingAllInsideFreezesTheFlatParameter) {
  auto net = FlatNet();
  {
    auto scope = net->UnflattenAsParams();
    for (const at::Tensor& parameter : net.module()->parameters()) {
      parameter.set_requires_grad(false);
    }
    EXPECT_OK(scope.Close());
  }
  EXPECT_FALSE(net->flat_param().requires_grad());
}

TEST(UnflattenAsParamsTest, CloseReportsWhatTheFlatParameterCannotBe) {
  auto net = FlatNet();
  const at::Tensor before = net->flat_param().detach().clone();
  auto frozen = net->UnflattenAsParams();
  net.module()->head->bias.set_requires_grad(false);
  EXPECT_THAT(frozen.Close(),
              StatusIs(Code::kInvalidArgument, HasSubstr("head.bias")));
  auto resized = net->UnflattenAsParams();
  net.module()->head->bias.set_data(at::zeros({2}));
  EXPECT_THAT(resized.Close(),
              StatusIs(Code::kInvalidArgument,
                       AllOf(HasSubstr("head.bias has sizes [2], not [5]"))));
  EXPECT_OK(resized.Close()) << "a second time";
  EXPECT_TRUE(net->flat_param().equal(before));
  EXPECT_TRUE(net->flat_param().requires_grad());
}

TEST(FlattenParamsTest, TheModuleHasItsParametersBackWhenTheWrapperIsGone) {
  const auto plain = MakeTiedNet();
  const auto module = MakeTiedNet();
  {
    auto net = ValueOrThrow(FlattenParams(module));
    net->forward(Input()).sum().backward();
  }
  plain->forward(Input()).sum().backward();
  EXPECT_EQ(Names(*module), Names(*plain));
  for (const auto& item : module->named_parameters()) {
    const at::Tensor expected = plain->named_parameters()[item.key()];
    EXPECT_TRUE(item.value().is_leaf());
    EXPECT_TRUE(item.value().equal(expected)) << item.key();
    EXPECT_TRUE(item.value().grad().equal(expected.grad())) << item.key();
  }
}

TEST(FlattenParamsTest, ParametersRegisteredLaterAreLeftAlone) {
  const auto module = MakeTiedNet();
  auto net = ValueOrThrow(FlattenParams(module));
  module->fc->register_parameter("late", at::zeros({1}));
  {
    const auto scope = net->UnflattenAsParams();
    EXPECT_THAT(Names(*module->fc), ElementsAre("weight", "bias", "late"));
  }
  EXPECT_THAT(Names(*module->fc), ElementsAre("late"));
}

// --- Flat data and refusals -------------------------------------------------

TEST(FlattenParamsTest, StartsFromFlatDataThatIsGiven) {
  const auto other = MakeTiedNet(1);
  FlattenOptions options;
  options.flat_data = FlatValues(*other).to(at::kDouble);
  ASSERT_OK_AND_ASSIGN(auto net, FlattenParams(MakeTiedNet(), options));
  EXPECT_EQ(net->flat_param().scalar_type(), at::kFloat);
  EXPECT_FALSE(net->flat_param().is_alias_of(options.flat_data));
  EXPECT_TRUE(net->forward(Input()).equal(other->forward(Input())));
  EXPECT_OK(net->SetFlatData(FlatValues(*MakeTiedNet())));
  EXPECT_TRUE(net->flat_param().equal(FlatValues(*MakeTiedNet())));
  EXPECT_THAT(net->SetFlatData(at::zeros({kNumElements, 1})),
              StatusIs(Code::kInvalidArgument, HasSubstr("105 elements")));
  options.flat_data = at::zeros({1});
  EXPECT_THAT(FlattenParams(MakeTiedNet(), options),
              StatusIs(Code::kInvalidArgument, HasSubstr("105 elements")));
}

TEST(FlattenParamsTest, RefusesParametersThatDiffer) {
  const auto refuses = [](const std::function<void(TiedNetImpl&)>& change,
                          const std::string& text) {
    const auto module = MakeTiedNet();
    change(*module);
    const std::vector<std::string> names = Names(*module);
    EXPECT_THAT(FlattenParams(module),
                StatusIs(Code::kInvalidArgument,
                         AllOf(HasSubstr("fc.weight"), HasSubstr(text))));
    EXPECT_EQ(Names(*module), names) << "nothing has been changed";
  };
  refuses(
      [](TiedNetImpl& net) {
        net.head->bias.set_data(at::zeros({5}, at::kDouble));
      },
      "head.bias is Double on cpu");
  refuses([](TiedNetImpl& net) { net.norm->bias.set_requires_grad(false); },
          "norm.bias is Float on cpu, frozen");
  refuses(
      [](TiedNetImpl& net) {
        net.blocks->parameters()[0].set_data(
            net.fc->weight.detach().view({25}).narrow(0, 0, 5));
      },
      "blocks.0.weight are different views of the same memory");
}

TEST(FlattenParamsTest, RefusesParametersWithoutDenseMemory) {
  const auto module = MakeTiedNet();
  module->register_parameter("extra", at::zeros({2, 2}).to_sparse(),
                             /*requires_grad=*/false);
  EXPECT_THAT(FlattenParams(module),
              StatusIs(Code::kInvalidArgument, HasSubstr("extra")));
  EXPECT_OK(FlattenParams(module, Only("blocks.")));
}

TEST(FlattenParamsTest, RefusesAListThatHasWhatIsRegistered) {
  const auto module = MakeTiedNet();
  torch::nn::ParameterList list;
  list->append(at::ones({2}));
  module->register_module("list", list);
  EXPECT_THAT(FlattenParams(module),
              StatusIs(Code::kInvalidArgument, HasSubstr("list.0 is in a")));
}

TEST(FlattenParamsTest, RefusesWhatAWrapperInsideHasFlattened) {
  const auto module = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto inner, FlattenParams(module->fc));
  EXPECT_THAT(FlattenParams(module),
              StatusIs(Code::kFailedPrecondition, HasSubstr("head.weight")))
      << "which is tied to fc.weight";
}

TEST(FlattenParamsTest, RefusesAModuleThatAnOptimizerHolds) {
  const auto module = MakeTiedNet();
  {
    const torch::optim::SGD optimizer(DistinctParameters(*module), 0.1);
    EXPECT_THAT(FlattenParams(module),
                StatusIs(Code::kFailedPrecondition, HasSubstr("optimizer")));
    FlattenOptions options;
    options.allow_outside_references = true;
    EXPECT_OK(FlattenParams(module, options));
  }
  EXPECT_OK(FlattenParams(module));
}

TEST(FlattenParamsTest, RefusesInferenceModeAndInferenceTensors) {
  std::shared_ptr<TiedNetImpl> module;
  {
    const c10::InferenceMode inference;
    module = MakeTiedNet();
    EXPECT_THAT(FlattenParams(module), StatusIs(Code::kFailedPrecondition,
                                                HasSubstr("inference mode")));
  }
  EXPECT_THAT(FlattenParams(module), StatusIs(Code::kFailedPrecondition,
                                              HasSubstr("inference tensor")));
}

}  // namespace

}  // namespace fsdp::flat_param::testing
