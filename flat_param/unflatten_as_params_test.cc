// Unflattening, flat data from elsewhere, and what cannot be flattened.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/status_error.h"
#include "base/testing/status_matchers.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/testing/flat_net.h"
#include "flat_param/testing/tied_net.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::flat_param {
namespace {

using ::fsdp::flat_param::testing::DistinctParameters;
using ::fsdp::flat_param::testing::ErrorOf;
using ::fsdp::flat_param::testing::Fill;
using ::fsdp::flat_param::testing::FlatGradient;
using ::fsdp::flat_param::testing::FlatNet;
using ::fsdp::flat_param::testing::FlatValues;
using ::fsdp::flat_param::testing::Input;
using ::fsdp::flat_param::testing::kDim;
using ::fsdp::flat_param::testing::kNumElements;
using ::fsdp::flat_param::testing::MakeTiedNet;
using ::fsdp::flat_param::testing::Names;
using ::fsdp::flat_param::testing::Only;
using ::fsdp::flat_param::testing::TiedNetImpl;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
    return ErrorOf([&] { const auto scope = net->UnflattenAsParams(data); });
  };
  EXPECT_THAT(error_of(at::zeros({3})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("105 elements"), HasSubstr("[3]"))));
  EXPECT_THAT(error_of(at::zeros({kNumElements}, at::kDouble)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("Float"), HasSubstr("Double"))));
  EXPECT_THAT(
      error_of(at::zeros({2 * kNumElements}).slice(0, 0, std::nullopt, 2)),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("strided")));
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
  EXPECT_THAT(frozen.Close(), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("head.bias")));
  auto resized = net->UnflattenAsParams();
  net.module()->head->bias.set_data(at::zeros({2}));
  EXPECT_THAT(resized.Close(),
              StatusIs(absl::StatusCode::kInvalidArgument,
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
  EXPECT_THAT(
      net->SetFlatData(at::zeros({kNumElements, 1})),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("105 elements")));
  options.flat_data = at::zeros({1});
  EXPECT_THAT(
      FlattenParams(MakeTiedNet(), options),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("105 elements")));
}

TEST(FlattenParamsTest, RefusesParametersThatDiffer) {
  const auto refuses = [](const std::function<void(TiedNetImpl&)>& change,
                          const std::string& text) {
    const auto module = MakeTiedNet();
    change(*module);
    const std::vector<std::string> names = Names(*module);
    EXPECT_THAT(FlattenParams(module),
                StatusIs(absl::StatusCode::kInvalidArgument,
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
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("extra")));
  EXPECT_OK(FlattenParams(module, Only("blocks.")));
}

TEST(FlattenParamsTest, RefusesWhatAWrapperInsideHasFlattened) {
  const auto module = MakeTiedNet();
  ASSERT_OK_AND_ASSIGN(auto inner, FlattenParams(module->fc));
  EXPECT_THAT(
      FlattenParams(module),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("head.weight")))
      << "which is tied to fc.weight";
}

TEST(FlattenParamsTest, RefusesAModuleThatAnOptimizerHolds) {
  const auto module = MakeTiedNet();
  {
    const torch::optim::SGD optimizer(DistinctParameters(*module), 0.1);
    EXPECT_THAT(FlattenParams(module),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("optimizer")));
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
    EXPECT_THAT(FlattenParams(module),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("inference mode")));
  }
  EXPECT_THAT(FlattenParams(module),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("inference tensor")));
}

}  // namespace
}  // namespace fsdp::flat_param
