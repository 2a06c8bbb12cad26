#include "fsdp/setup/module_tree.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "fsdp/options/options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::torch::nn::Linear;
using ::torch::nn::LinearImpl;

std::vector<std::string> Paths(const ModuleTree& tree, bool units_only) {
  std::vector<std::string> paths;
  for (const ModuleNode& node : tree.nodes) {
    if (node.is_unit || !units_only) paths.push_back(node.path);
  }
  return paths;
}

std::vector<std::string> Names(const ModuleTree& tree) {
  std::vector<std::string> names;
  names.reserve(tree.uses.size());
  for (const ParameterUse& use : tree.uses) names.push_back(use.name);
  return names;
}

std::shared_ptr<torch::nn::SequentialImpl> TwoLevels() {
  return std::make_shared<torch::nn::SequentialImpl>(
      Linear(2, 3),                                         // 9 elements
      Linear(torch::nn::LinearOptions(3, 4).bias(false)));  // 12
}

class Holder : public torch::nn::Module {
 public:
  Holder()
      : inner(register_module("inner", TwoLevels())),
        list(register_module("list", torch::nn::ModuleList(Linear(2, 2)))),
        own(register_parameter("own", at::ones({5}))) {}
  std::shared_ptr<torch::nn::SequentialImpl> inner;
  torch::nn::ModuleList list;
  at::Tensor own;
};

TEST(ReadModuleTreeTest, NamesModulesAndParametersInPreOrder) {
  ASSERT_OK_AND_ASSIGN(const ModuleTree tree,
                       ReadModuleTree(std::make_shared<Holder>(), {}));
  EXPECT_THAT(Paths(tree, false),
              ElementsAre("", "inner", "inner.0", "inner.1", "list", "list.0"));
  EXPECT_THAT(Paths(tree, true), ElementsAre(""));
  EXPECT_THAT(Names(tree),
              ElementsAre("own", "inner.0.weight", "inner.0.bias",
                          "inner.1.weight", "list.0.weight", "list.0.bias"));
}

TEST(ReadModuleTreeTest, AsksThePolicyBottomUpButNeverForListsAndTheRoot) {
  std::vector<std::string> asked;
  std::vector<int64_t> unowned;
  const WrapPolicy policy = [&](const WrapCandidate& candidate) {
    asked.push_back(candidate.path);
    unowned.push_back(candidate.unowned_numel);
    return candidate.path == "inner.1";
  };
  ASSERT_OK_AND_ASSIGN(
      const ModuleTree tree,
      ReadModuleTree(std::make_shared<Holder>(), {policy, {}, {}}));
  EXPECT_THAT(asked, ElementsAre("inner.0", "inner.1", "inner", "list.0"));
  EXPECT_THAT(unowned, ElementsAre(9, 12, 9, 6));
  EXPECT_THAT(Paths(tree, true), ElementsAre("", "inner.1"));
}

TEST(WrapPolicyTest, ByTypeBySizeAndEither) {
  const auto units = [](const WrapPolicy& policy) {
    return Paths(*ReadModuleTree(std::make_shared<Holder>(), {policy, {}, {}}),
                 true);
  };
  EXPECT_THAT(units(WrapModules<LinearImpl>()),
              ElementsAre("", "inner.0", "inner.1", "list.0"));
  EXPECT_THAT(units(WrapModules<torch::nn::SequentialImpl>()),
              ElementsAre("", "inner"));
  EXPECT_THAT(units(WrapLargerThan(12)), ElementsAre("", "inner.1"));
  EXPECT_THAT(units(WrapLargerThan(15)), ElementsAre("", "inner"));
  EXPECT_THAT(units(WrapAny(WrapLargerThan(12),
                            WrapModules<torch::nn::SequentialImpl>())),
              ElementsAre("", "inner", "inner.1"));
}

class Tied : public torch::nn::Module {
 public:
  Tied() {
    const at::Tensor weight = at::ones({2, 3});
    register_parameter("same_object_a", weight);
    register_parameter("same_object_b", weight);
    register_parameter("same_view", weight.view({2, 3}).detach());
    register_parameter("own_memory", weight.clone());
    register_parameter("empty_a", at::ones({0}));
    register_parameter("empty_b", at::ones({0}));
  }
};

TEST(ReadModuleTreeTest, FindsTiesByObjectAndByMemory) {
  ASSERT_OK_AND_ASSIGN(const ModuleTree tree,
                       ReadModuleTree(std::make_shared<Tied>(), {}));
  std::vector<int> parameters;
  parameters.reserve(tree.uses.size());
  for (const ParameterUse& use : tree.uses) parameters.push_back(use.parameter);
  EXPECT_THAT(parameters, ElementsAre(0, 0, 0, 1, 2, 3));
  EXPECT_EQ(tree.parameters[0].size(), 2);  // two objects, one parameter
  EXPECT_EQ(tree.parameters[1].size(), 1);
}

class SharedModule : public torch::nn::Module {
 public:
  SharedModule() {
    Linear linear(2, 2);
    register_module("a", linear.ptr());
    register_module("b", linear.ptr());
  }
};

TEST(ReadModuleTreeTest, ASharedModuleAppearsAtEveryPlaceWithOneIdentity) {
  ASSERT_OK_AND_ASSIGN(const ModuleTree tree,
                       ReadModuleTree(std::make_shared<SharedModule>(),
                                      {WrapModules<LinearImpl>(), {}, {}}));
  ASSERT_THAT(Paths(tree, true), ElementsAre("", "a", "b"));
  EXPECT_EQ(tree.nodes[1].identity, tree.nodes[2].identity);
  EXPECT_EQ(tree.parameters.size(), 2);
}

}  // namespace
}  // namespace fsdp
