#include "checkpoint/save/dcp_groups.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/save/dcp_export.h"
#include "checkpoint/torch_archive/value.h"
#include "fsdp/state/optimizer_values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// As Python prints it.
std::string ToString(const Value& value) {
  if (const auto* const flag = std::get_if<bool>(&value.is)) {
    return *flag ? "True" : "False";
  }
  if (const auto* const number = std::get_if<double>(&value.is)) {
    return absl::StrCat(*number);
  }
  if (const auto* const text = std::get_if<std::string>(&value.is)) {
    return absl::StrCat("'", *text, "'");
  }
  std::string items;
  if (const auto* const tuple = std::get_if<Value::Tuple>(&value.is)) {
    for (const Value& one : tuple->items) {
      absl::StrAppend(&items, items.empty() ? "" : ", ", ToString(one));
    }
    return absl::StrCat("(", items, ")");
  }
  if (const auto* const list = std::get_if<Value::List>(&value.is)) {
    for (const Value& one : list->items) {
      absl::StrAppend(&items, items.empty() ? "" : ", ", ToString(one));
    }
    return absl::StrCat("[", items, "]");
  }
  return std::holds_alternative<Value::None>(value.is) ? "None" : "?";
}

std::map<std::string, std::string> ByName(
    const std::vector<DcpWriteValue>& values) {
  std::map<std::string, std::string> result;
  for (const DcpWriteValue& value : values) {
    result[DcpName(value.path)] = ToString(value.value);
  }
  return result;
}

template <typename Options>
OptimizerGroup Group(std::vector<std::string> names, Options options) {
  return {std::move(names), std::make_shared<Options>(std::move(options))};
}

// What torch 2.11's optimizers have in param_groups, in a state dict.
TEST(DcpGroupsTest, HasTheKeysOfTheClassInPython) {
  const auto values = DcpGroupValues(
      DcpNames::kPlain,
      {Group({"a", "b"},
             torch::optim::AdamWOptions(0.5).betas({0.25, 0.75}).eps(2)),
       Group({"c"}, torch::optim::AdamWOptions(4).weight_decay(8))});
  ASSERT_TRUE(values.ok()) << values.status();
  std::map<std::string, std::string> expected = {
      {"optim.param_groups.0.params", "['a', 'b']"},
      {"optim.param_groups.0.lr", "0.5"},
      {"optim.param_groups.0.betas", "(0.25, 0.75)"},
      {"optim.param_groups.0.eps", "2"},
      {"optim.param_groups.0.weight_decay", "0.01"},
      {"optim.param_groups.1.params", "['c']"},
      {"optim.param_groups.1.lr", "4"},
      {"optim.param_groups.1.betas", "(0.9, 0.999)"},
      {"optim.param_groups.1.eps", "1e-08"},
      {"optim.param_groups.1.weight_decay", "8"}};
  for (const char* const group : {"0.", "1."}) {
    for (const auto& [key, value] : std::map<std::string, std::string>{
             {"amsgrad", "False"},
             {"maximize", "False"},
             {"foreach", "None"},
             {"capturable", "False"},
             {"differentiable", "False"},
             {"fused", "None"},
             {"decoupled_weight_decay", "True"}}) {
      expected[absl::StrCat("optim.param_groups.", group, key)] = value;
    }
  }
  EXPECT_EQ(ByName(*values), expected);
}

TEST(DcpGroupsTest, ClassesHaveDifferentKeys) {
  const auto keys = [](OptimizerGroup group) {
    std::vector<std::string> result;
    for (const auto& [name, value] :
         ByName(*DcpGroupValues(DcpNames::kPlain, {std::move(group)}))) {
      result.push_back(name.substr(name.rfind('.') + 1));
    }
    return result;
  };
  EXPECT_THAT(keys(Group({}, torch::optim::SGDOptions(1))),
              UnorderedElementsAre("params", "lr", "momentum", "dampening",
                                   "weight_decay", "nesterov", "maximize",
                                   "foreach", "differentiable", "fused"));
  EXPECT_THAT(keys(Group({}, torch::optim::RMSpropOptions())),
              UnorderedElementsAre("params", "lr", "momentum", "alpha", "eps",
                                   "centered", "weight_decay", "maximize",
                                   "foreach", "differentiable", "capturable"));
}

TEST(DcpGroupsTest, TorchtitanHasOneOfEachParameter) {
  const auto values =
      DcpGroupValues(DcpNames::kTorchtitan,
                     {Group({"a", "b.c"}, torch::optim::SGDOptions(0.5)),
                      Group({"d"}, torch::optim::SGDOptions(2))});
  ASSERT_TRUE(values.ok()) << values.status();
  std::map<std::string, std::string> rates;
  for (const auto& [name, value] : ByName(*values)) {
    if (name.substr(name.size() - 3) == ".lr") rates[name] = value;
  }
  EXPECT_THAT(rates, ElementsAre(Pair("optimizer.param_groups.a.lr", "0.5"),
                                 Pair("optimizer.param_groups.b.c.lr", "0.5"),
                                 Pair("optimizer.param_groups.d.lr", "2")));
  // The name of a parameter is one key, dots and all.
  EXPECT_EQ(values->front().path.size(), 2);
}

TEST(DcpGroupsTest, NoOptimizerHasNoGroups) {
  const auto values = DcpGroupValues(DcpNames::kPlain, {});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_TRUE(values->empty());
}

TEST(DcpGroupsTest, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(DcpGroupValues(DcpNames::kPlain,
                             {Group({"a"}, torch::optim::LBFGSOptions())}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("of a class that is not known")));
  EXPECT_THAT(
      DcpGroupValues(
          DcpNames::kPlain,
          {Group({"a"}, torch::optim::SGDOptions(
                            std::numeric_limits<double>::quiet_NaN()))}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("lr of SGD is not finite")));
}

}  // namespace
}  // namespace fsdp::checkpoint
