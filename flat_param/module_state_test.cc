// State dicts, archives and clones of flattened modules.
#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/testing/tied_net.h"

namespace fsdp::flat_param::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A net whose blocks are flattened, inside a wrapper of the rest.
FlattenParamsWrapper<FlattenParamsWrapperImpl<TiedNetImpl>> NestedNet(
    int seed = 0) {
  return ValueOrThrow(FlattenParams(
      ValueOrThrow(FlattenParams(MakeTiedNet(seed), Only("blocks.")))));
}

void ExpectEqual(const NamedTensors& actual, const NamedTensors& expected) {
  EXPECT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected) {
    ASSERT_TRUE(actual.contains(item.key()));
    EXPECT_TRUE(actual[item.key()].equal(item.value())) << item.key();
  }
}

template <typename Source, typename Target>
void SaveAndLoad(const Source& source, Target& target) {
  std::stringstream stream;
  torch::save(source, stream);
  torch::load(target, stream);
}

TEST(StateDictTest, EqualsThatOfTheUnwrappedModule) {
  const auto plain = MakeTiedNet();
  const NamedTensors expected = StateDict(plain);
  EXPECT_EQ(
      expected.keys(),
      (std::vector<std::string>{
          "fc.weight", "fc.bias", "norm.weight", "norm.bias",
          "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
          "blocks.0.weight", "blocks.0.bias", "blocks.1.weight",
          "blocks.1.bias", "head.weight", "head.bias"}));
  auto flat = FlatNet();
  ExpectEqual(StateDict(flat.ptr()), expected);
  EXPECT_TRUE(flat->flat_param().defined());
  ExpectEqual(StateDict(NestedNet().ptr()), expected);
  EXPECT_FALSE(expected["fc.weight"].requires_grad());
}

TEST(StateDictTest, IsCleanedOfNamesOfWrappersWithoutParameters) {
  torch::nn::Sequential inside(
      ValueOrThrow(FlattenParams(torch::nn::Linear(2, 2))));
  const auto net = ValueOrThrow(FlattenParams(inside, Only("none")));
  EXPECT_THAT(StateDict(net.ptr()).keys(), ElementsAre("0.weight", "0.bias"));
  EXPECT_THAT(StateDict(inside.ptr()).keys(), ElementsAre("0.weight", "0.bias"))
      << "without a wrapper around";
}

TEST(StateDictTest, LoadsIntoAnyNestingOfWrappers) {
  const NamedTensors source = StateDict(MakeTiedNet(1));
  const auto plain = MakeTiedNet();
  const auto flat = FlatNet();
  const auto nested = NestedNet();
  NamedTensors in_double;  // a state of any dtype will do
  for (const auto& item : source) {
    in_double.insert(item.key(), item.value().to(at::kDouble));
  }
  ASSERT_OK(LoadStateDict(plain, source));
  ASSERT_OK(LoadStateDict(flat.ptr(), in_double));
  ASSERT_OK(LoadStateDict(nested.ptr(), source));
  ExpectEqual(StateDict(plain), source);
  ExpectEqual(StateDict(flat.ptr()), source);
  ExpectEqual(StateDict(nested.ptr()), source);
  EXPECT_TRUE(flat.module()->fc->weight.is_alias_of(flat->flat_param()));
}

TEST(StateDictTest, LoadingListsAllDifferencesAndCopiesNothing) {
  const auto flat = FlatNet();
  NamedTensors source = StateDict(MakeTiedNet(1));
  source.erase("fc.bias");
  source.erase("norm.running_mean");
  source["head.bias"] = at::zeros({kDim, 1});
  source["blocks.0.bias"] = at::Tensor();
  source.insert("extra", at::zeros({1}));
  EXPECT_THAT(LoadStateDict(flat.ptr(), source),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("fc.bias is missing"),
                             HasSubstr("norm.running_mean is missing"),
                             HasSubstr("head.bias has sizes [5, 1], not [5]"),
                             HasSubstr("blocks.0.bias is undefined"),
                             HasSubstr("extra is unexpected"))));
  ExpectEqual(StateDict(flat.ptr()), StateDict(MakeTiedNet()));
  EXPECT_THAT(
      LoadStateDict(flat.ptr(), source, /*strict=*/false),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("head.bias"), HasSubstr("blocks.0.bias"),
                     Not(HasSubstr("missing")), Not(HasSubstr("unexpected")))));
  source.erase("head.bias");
  source.erase("blocks.0.bias");
  ASSERT_OK(LoadStateDict(flat.ptr(), source, /*strict=*/false));
  EXPECT_TRUE(StateDict(flat.ptr())["fc.weight"].equal(
      StateDict(MakeTiedNet(1))["fc.weight"]));
  EXPECT_TRUE(StateDict(flat.ptr())["fc.bias"].equal(
      StateDict(MakeTiedNet())["fc.bias"]));
}

TEST(StateDictTest, TheFlatFormHasFlatParametersAndRoundTrips) {
  const auto flat = FlatNet();
  EXPECT_THAT(StateDict(flat.ptr(), StateForm::kFlat).keys(),
              ElementsAre("flat_param", "norm.running_mean", "norm.running_var",
                          "norm.num_batches_tracked"));
  const auto target = FlatNet(1);
  ASSERT_OK(LoadStateDict(target.ptr(), StateDict(flat.ptr(), StateForm::kFlat),
                          /*strict=*/true, StateForm::kFlat));
  ExpectEqual(StateDict(target.ptr()), StateDict(flat.ptr()));

  const auto nested = NestedNet();
  const NamedTensors state = StateDict(nested.ptr(), StateForm::kFlat);
  EXPECT_EQ(state["flat_param"].numel(), kNumElements - 60);
  EXPECT_EQ(state["flat_param_1"].numel(), 60);
  const auto nested_target = NestedNet(1);
  ASSERT_OK(LoadStateDict(nested_target.ptr(), state, /*strict=*/true,
                          StateForm::kFlat));
  ExpectEqual(StateDict(nested_target.ptr()), StateDict(nested.ptr()));

  torch::nn::Sequential parent(FlatNet());
  EXPECT_TRUE(
      StateDict(parent.ptr(), StateForm::kFlat).contains("0.flat_param"));
  EXPECT_THAT(
      LoadStateDict(flat.ptr(), state, /*strict=*/true, StateForm::kFlat),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("flat_param has sizes [45], not [105]"),
                     HasSubstr("flat_param_1 is unexpected"))));
}

TEST(ArchiveTest, AWrappersArchiveIsThatOfTheUnwrappedModule) {
  const auto source = FlatNet(1);
  auto plain = MakeTiedNet();
  SaveAndLoad(source, plain);
  ExpectEqual(StateDict(plain), StateDict(MakeTiedNet(1)));
  EXPECT_TRUE(source->flat_param().defined());
}

TEST(ArchiveTest, AWrapperLoadsWhatTheUnwrappedModuleHasSaved) {
  const auto source = MakeTiedNet(1);
  source->norm->running_mean.fill_(3);
  auto flat = FlatNet();
  SaveAndLoad(source, flat);
  ExpectEqual(StateDict(flat.ptr()), StateDict(source));
  EXPECT_TRUE(flat.module()->fc->weight.is_alias_of(flat->flat_param()));
  source->eval();
  flat->eval();
  EXPECT_TRUE(flat->forward(Input()).equal(source->forward(Input())));
  flat->forward(Input()).sum().backward();
  EXPECT_TRUE(flat->flat_param().grad().defined());
}

TEST(ArchiveTest, NestedWrappersLeaveNoTrace) {
  auto plain = MakeTiedNet();
  SaveAndLoad(NestedNet(1), plain);
  ExpectEqual(StateDict(plain), StateDict(MakeTiedNet(1)));
  auto nested = NestedNet();
  SaveAndLoad(plain, nested);
  ExpectEqual(StateDict(nested.ptr()), StateDict(plain));

  torch::nn::Sequential wrapped_child(FlatNet(2));
  torch::nn::Sequential plain_child(MakeTiedNet());
  SaveAndLoad(wrapped_child, plain_child);
  ExpectEqual(StateDict(plain_child.ptr()), StateDict(wrapped_child.ptr()));
}

TEST(ArchiveTest, LoadingOtherSizesIsRefusedAndKeepsTheValues) {
  torch::nn::Linear other(2, 3);
  auto flat = ValueOrThrow(FlattenParams(torch::nn::Linear(4, 3)));
  const at::Tensor before = StateDict(flat.ptr())["weight"].clone();
  EXPECT_THAT(
      TorchToStatus("call", [&] { SaveAndLoad(other, flat); }),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("loading an archive"),
                     HasSubstr("weight has sizes [3, 2], not [3, 4]"))));
  EXPECT_TRUE(StateDict(flat.ptr())["weight"].equal(before));
  EXPECT_TRUE(StateDict(flat.ptr())["bias"].equal(other->bias))
      << "what fits is loaded, as by an unwrapped module";
  EXPECT_EQ(flat->forward(at::ones({1, 4})).numel(), 3);
}

TEST(CloneTest, IsADeepCopyThatIsFlatAgain) {
  auto net = FlatNet(1);
  net.module()->norm->running_mean.fill_(2);
  const auto copy =
      std::dynamic_pointer_cast<FlattenParamsWrapperImpl<TiedNetImpl>>(
          net->clone(at::Device(at::kCPU)));
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->flat_param().numel(), kNumElements);
  EXPECT_TRUE(
      copy->module()->fc->weight.is_alias_of(copy->module()->head->weight));
  EXPECT_THAT(copy->named_parameters().keys(), ElementsAre("flat_param"));
  EXPECT_NE(copy->module(), net.module());
  ExpectEqual(StateDict(copy), StateDict(net.ptr()));
  EXPECT_TRUE(copy->forward(Input()).equal(net->forward(Input())));
  copy->forward(Input()).sum().backward();
  EXPECT_TRUE(copy->flat_param().grad().defined());
  EXPECT_FALSE(net->flat_param().grad().defined());
  const at::Tensor before = net->flat_param().detach().clone();
  copy->flat_param().detach().fill_(0);
  EXPECT_TRUE(net->flat_param().equal(before));
}

TEST(CloneTest, WorksInsideSequentialAndNested) {
  torch::nn::Sequential parent(FlatNet(1), torch::nn::Linear(kDim, kDim));
  const auto copy =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(parent->clone());
  EXPECT_EQ(copy->named_parameters().keys(), parent->named_parameters().keys());
  EXPECT_TRUE(copy->forward(Input()).equal(parent->forward(Input())));

  auto nested = NestedNet(1);
  const auto nested_copy = nested->clone();
  EXPECT_EQ(nested_copy->named_parameters().keys(),
            nested->named_parameters().keys());
  ExpectEqual(StateDict(nested_copy), StateDict(nested.ptr()));
}

class ParentImpl : public torch::nn::Cloneable<ParentImpl> {
 public:
  ParentImpl() { reset(); }
  void reset() override {
    child = ValueOrThrow(FlattenParams(torch::nn::Linear(kDim, kDim)));
    register_module("child", child);
  }
  at::Tensor forward(const at::Tensor& x) { return child->forward(x); }

  FlattenParamsWrapper<torch::nn::LinearImpl> child{nullptr};
};

TEST(CloneTest, AParentWhoseResetWrapsClonesItsWrappers) {
  const auto parent = std::make_shared<ParentImpl>();
  const auto copy = std::dynamic_pointer_cast<ParentImpl>(parent->clone());
  EXPECT_THAT(copy->named_parameters().keys(), ElementsAre("child.flat_param"));
  EXPECT_TRUE(copy->forward(Input()).equal(parent->forward(Input())));
  EXPECT_FALSE(
      copy->child->flat_param().is_alias_of(parent->child->flat_param()));
  copy->forward(Input()).sum().backward();
  EXPECT_TRUE(copy->child->flat_param().grad().defined());
  EXPECT_TRUE(copy->parameters()[0].is_same(copy->child->flat_param()));
}

}  // namespace
}  // namespace fsdp::flat_param::testing
