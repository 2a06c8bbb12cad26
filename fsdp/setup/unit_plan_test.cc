#include "fsdp/setup/unit_plan.h"

#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::torch::nn::Linear;
using ::torch::nn::LinearImpl;

TEST(PlanUnitsTest, RefusesAModelWithoutParameters) {
  EXPECT_THAT(PlanUnits({{"", -1, /*is_unit=*/true, 0}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the model has no parameters")));
}

// A random model: modules by identity, each with children of larger identity,
// laid out with every place of a shared module spelled out.
struct RandomModel {
  explicit RandomModel(std::mt19937& random) {
    const int num_modules = 1 + static_cast<int>(random() % 8);
    std::vector<std::vector<int>> children(num_modules);
    std::vector<bool> is_unit(num_modules);
    for (int i = 0; i < num_modules; ++i) {
      is_unit[i] = i == 0 || random() % 2 == 0;
      const int num_places =
          i == 0 ? 0 : 1 + static_cast<int>(random() % 5 / 3);
      for (int place = 0; place < num_places; ++place) {
        children[random() % i].push_back(i);
      }
    }
    AddPlaces(0, -1, "", children, is_unit);
    const int num_uses = 1 + static_cast<int>(random() % 10);
    for (int i = 0; i < num_uses; ++i) {
      const int module = static_cast<int>(random() % modules.size());
      uses.push_back({module, absl::StrCat(modules[module].path, ".w", i),
                      static_cast<int>(random() % 6)});
    }
  }

  void AddPlaces(int identity, int parent, const std::string& path,
                 const std::vector<std::vector<int>>& children,
                 const std::vector<bool>& is_unit) {
    const int node = static_cast<int>(modules.size());
    modules.push_back({path, parent, is_unit[identity], identity});
    for (size_t i = 0; i < children[identity].size(); ++i) {
      AddPlaces(children[identity][i], node, absl::StrCat(path, "/", i),
                children, is_unit);
    }
  }

  int UseNamed(const std::string& name) const {
    int use = 0;
    while (uses[use].name != name) ++use;
    return use;
  }

  std::vector<ModuleNode> modules;
  std::vector<ParameterUse> uses;
};

// Returns the identities of the units on the way from the root to `node`,
// inclusive.
std::vector<int> UnitsOnTheWay(const RandomModel& model, int node) {
  std::vector<int> units;
  for (; node != -1; node = model.modules[node].parent) {
    if (model.modules[node].is_unit) {
      units.push_back(model.modules[node].identity);
    }
  }
  std::reverse(units.begin(), units.end());
  return units;
}

int LastInCommon(const std::vector<std::vector<int>>& ways) {
  int last = -1;
  for (const int unit : ways.front()) {
    const bool common =
        std::all_of(ways.begin(), ways.end(), [&](const auto& way) {
          return std::count(way.begin(), way.end(), unit) > 0;
        });
    if (common) last = unit;
  }
  return last;
}

// Returns the identity of each parameter's unit, by definition.
std::map<int, int> SlowOwners(const RandomModel& model) {
  std::map<int, std::vector<std::vector<int>>> ways;
  for (const ParameterUse& use : model.uses) {
    for (size_t node = 0; node < model.modules.size(); ++node) {
      if (model.modules[node].identity == model.modules[use.module].identity) {
        ways[use.parameter].push_back(
            UnitsOnTheWay(model, static_cast<int>(node)));
      }
    }
  }
  std::map<int, int> owners;
  for (const auto& [parameter, its_ways] : ways) {
    owners[parameter] = LastInCommon(its_ways);
  }
  return owners;
}

// Returns the identity of each unit's parent, by definition.
std::map<int, int> SlowParents(const RandomModel& model) {
  std::map<int, std::vector<std::vector<int>>> ways;
  for (size_t node = 0; node < model.modules.size(); ++node) {
    if (!model.modules[node].is_unit) continue;
    ways[model.modules[node].identity].push_back(
        UnitsOnTheWay(model, model.modules[node].parent));
  }
  std::map<int, int> parents;
  for (const auto& [unit, its_ways] : ways) {
    parents[unit] = LastInCommon(its_ways);
  }
  return parents;
}

TEST(PlanUnitsPropertyTest, AgreesWithTheDefinition) {
  std::mt19937 random(20260726);
  for (int trial = 0; trial < 2000; ++trial) {
    SCOPED_TRACE(absl::StrCat("trial ", trial));
    const RandomModel model(random);
    ASSERT_OK_AND_ASSIGN(const std::vector<Unit> units,
                         PlanUnits(model.modules, model.uses));
    const auto identity = [&](int unit) {
      return unit == -1 ? -1 : model.modules[units[unit].module].identity;
    };
    std::map<int, int> owners;
    std::map<int, int> parents;
    size_t num_names = 0;
    for (int i = 0; i < static_cast<int>(units.size()); ++i) {
      EXPECT_LT(units[i].parent, i);
      EXPECT_EQ(units[i].name, model.modules[units[i].module].path);
      EXPECT_EQ(DisplayName(units[i]), i == 0 ? "root" : units[i].name);
      EXPECT_TRUE(
          parents.emplace(identity(i), identity(units[i].parent)).second);
      std::vector<int> first_uses;
      for (const OwnedParameter& owned : units[i].parameters) {
        EXPECT_TRUE(owners.emplace(owned.parameter, identity(i)).second);
        num_names += owned.names.size();
        std::vector<int> its_uses;
        for (const std::string& name : owned.names) {
          its_uses.push_back(model.UseNamed(name));
        }
        EXPECT_TRUE(std::is_sorted(its_uses.begin(), its_uses.end()));
        first_uses.push_back(its_uses.front());
      }
      EXPECT_TRUE(std::is_sorted(first_uses.begin(), first_uses.end()));
    }
    EXPECT_EQ(owners, SlowOwners(model));
    EXPECT_EQ(parents, SlowParents(model));
    EXPECT_EQ(num_names, model.uses.size());
    if (HasFailure()) return;
  }
}

std::vector<std::string> Paths(const ModuleTree& tree, bool units_only) {
  std::vector<std::string> paths;
  for (const ModuleNode& node : tree.nodes) {
    if (node.is_unit || !units_only) paths.push_back(node.path);
  }
  return paths;
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
  const auto use = [](const char* name) {
    return Field("name", &ParameterUse::name, name);
  };
  EXPECT_THAT(tree.uses, ElementsAre(use("own"), use("inner.0.weight"),
                                     use("inner.0.bias"), use("inner.1.weight"),
                                     use("list.0.weight"), use("list.0.bias")));
}

Options Wrapping(WrapPolicy policy) {
  Options options;
  options.wrap_policy = std::move(policy);
  return options;
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
      ReadModuleTree(std::make_shared<Holder>(), Wrapping(policy)));
  EXPECT_THAT(asked, ElementsAre("inner.0", "inner.1", "inner", "list.0"));
  EXPECT_THAT(unowned, ElementsAre(9, 12, 9, 6));
  EXPECT_THAT(Paths(tree, true), ElementsAre("", "inner.1"));
}

TEST(WrapPolicyTest, ByTypeBySizeAndEither) {
  const auto units = [](const WrapPolicy& policy) {
    return Paths(*ReadModuleTree(std::make_shared<Holder>(), Wrapping(policy)),
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
                                      Wrapping(WrapModules<LinearImpl>())));
  ASSERT_THAT(Paths(tree, true), ElementsAre("", "a", "b"));
  EXPECT_EQ(tree.nodes[1].identity, tree.nodes[2].identity);
  EXPECT_EQ(tree.parameters.size(), 2);
}

}  // namespace
}  // namespace fsdp
