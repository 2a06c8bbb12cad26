#include "checkpoint/load/dcp_record.h"

#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/dcp_optimizer.h"
#include "checkpoint/run/optimizer_options.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "checkpoint/tensor/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// The parameters a, b and c; "tied" is another name of a.
struct Weights : torch::nn::Module {
  Weights() {
    for (const char* const name : {"a", "b", "c"}) {
      all.push_back(register_parameter(name, at::zeros({3})));
    }
    register_parameter("tied", all[0]);
  }
  std::vector<at::Tensor> all;
};

// {a, b} and {c}.
std::vector<torch::optim::OptimizerParamGroup> GroupsOf(
    const Weights& weights) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{weights.all[0], weights.all[1]});
  groups.emplace_back(std::vector<at::Tensor>{weights.all[2]});
  return groups;
}

void AddState(DcpOptimizer& stored, const std::string& parameter,
              const std::string& name) {
  StoredTensor tensor;
  tensor.info = {parameter, Dtype::kF32, {0}};
  ASSERT_OK(stored.slots[name].AddTensor(tensor));
}

// What Python's AdamW has.
DcpGroup AdamWGroup(std::vector<std::string> names, double lr) {
  return {std::move(names),
          {{"lr", lr},
           {"betas", Json::Array{0.5, 0.75}},
           {"eps", 1e-8},
           {"weight_decay", 0},
           {"amsgrad", false},
           {"maximize", false},
           {"foreach", Json()},
           {"capturable", true},
           {"differentiable", false},
           {"fused", true},
           {"decoupled_weight_decay", true},
           {"initial_lr", 1.0}}};
}

DcpOptimizer AdamWOf(std::vector<DcpGroup> groups) {
  DcpOptimizer stored;
  for (const char* const name : {"tied", "b", "c"}) {
    AddState(stored, name, "exp_avg");
    AddState(stored, name, "exp_avg_sq");
    stored.numbers[name]["step"] = 3;
  }
  stored.groups = std::move(groups);
  stored.is_flattened = stored.groups.size() == 3;
  return stored;
}

DcpOptimizer Listed() {
  return AdamWOf({AdamWGroup({"c"}, 0.25), AdamWGroup({"b", "tied"}, 0.5)});
}
DcpOptimizer Flattened() {
  return AdamWOf({AdamWGroup({"b"}, 0.5), AdamWGroup({"c"}, 0.25),
                  AdamWGroup({"tied"}, 0.5)});
}

template <typename Optimizer, typename Options>
absl::StatusOr<TrainingRecord> Translate(const DcpOptimizer& stored,
                                         const Options& options,
                                         bool strict = true) {
  Weights weights;
  Optimizer optimizer(GroupsOf(weights), options);
  TrainingRun run;
  run.model = &weights;
  run.optimizer = &optimizer;
  const auto values = RunValues::Read(run, "test");
  if (!values.ok()) return values.status();
  return RecordOfDcp(stored, *values, optimizer, strict);
}

absl::StatusOr<TrainingRecord> ToAdamW(const DcpOptimizer& stored,
                                       bool strict = true) {
  return Translate<torch::optim::AdamW>(
      stored, torch::optim::AdamWOptions(9).amsgrad(true), strict);
}

TEST(DcpRecordTest, GroupsOfAList) {
  ASSERT_OK_AND_ASSIGN(const TrainingRecord record, ToAdamW(Listed()));
  EXPECT_THAT(record.slots, ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_EQ(record.numbers.at("tied").at("step"), 3);
  ASSERT_EQ(record.groups->size(), 2u);
  EXPECT_THAT((*record.groups)[0].names, ElementsAre("c"));
  EXPECT_THAT((*record.groups)[1].names, ElementsAre("b", "tied"));
  EXPECT_EQ(OptionsToJson(*(*record.groups)[1].options)->ToString(),
            "{\"class\": \"AdamW\", \"lr\": 0.5, \"betas\": [0.5, 0.75], "
            "\"eps\": 1e-08, \"weight_decay\": 0.0, \"amsgrad\": false}");
}

TEST(DcpRecordTest, FlattenedGroupsAreThoseOfTheRun) {
  ASSERT_OK_AND_ASSIGN(const TrainingRecord record, ToAdamW(Flattened()));
  ASSERT_EQ(record.groups->size(), 2u);
  EXPECT_THAT((*record.groups)[0].names, ElementsAre("a", "b"));
  EXPECT_EQ((*record.groups)[0].options->get_lr(), 0.5);
  EXPECT_THAT((*record.groups)[1].names, ElementsAre("c"));
  EXPECT_EQ((*record.groups)[1].options->get_lr(), 0.25);
}

TEST(DcpRecordTest, FlattenedGroupsThatDoNotFit) {
  DcpOptimizer stored = Flattened();
  stored.groups[0].options["lr"] = 0.75;
  EXPECT_THAT(
      ToAdamW(stored).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("param_groups.b: has other options than tied")));
  stored = Flattened();
  stored.groups[1].names = {"d"};
  EXPECT_THAT(ToAdamW(stored).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("missing: param_groups.c\n"),
                             HasSubstr("unexpected: param_groups.d"))));
  AddState(stored, "c", "max_exp_avg_sq");  // which its own options ask for
  ASSERT_OK_AND_ASSIGN(const TrainingRecord record,
                       ToAdamW(stored, /*strict=*/false));
  EXPECT_EQ((*record.groups)[1].options->get_lr(), 9);  // its own
}

TEST(DcpRecordTest, WithoutGroupsThoseOfTheRunStayUnlessStrict) {
  DcpOptimizer stored = AdamWOf({});
  for (const char* const name : {"tied", "b", "c"}) {
    AddState(stored, name, "max_exp_avg_sq");
  }
  ASSERT_OK_AND_ASSIGN(const TrainingRecord record,
                       ToAdamW(stored, /*strict=*/false));
  ASSERT_EQ(record.groups->size(), 2u);
  EXPECT_EQ((*record.groups)[0].options->get_lr(), 9);
  EXPECT_THAT(ToAdamW(stored).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("missing: param_groups")));
}

TEST(DcpRecordTest, OptionsThatAreRefused) {
  const struct {
    std::function<void(std::map<std::string, Json>&)> change;
    const char* why;
    bool is_strict;  // alone
  } cases[] = {
      {[](auto& options) { options["maximize"] = true; },
       "param_groups.0.maximize: LibTorch's AdamW has no such option", false},
      {[](auto& options) { options["maximize"] = "a dict"; },
       "param_groups.0.maximize: LibTorch's AdamW has no such option", false},
      {[](auto& options) { options["decoupled_weight_decay"] = false; },
       "param_groups.0.decoupled_weight_decay: is that of Adam", false},
      {[](auto& options) { options["layer_scale"] = 0.5; },
       "param_groups.0.layer_scale: LibTorch's AdamW has no such option; load "
       "without `strict` to leave it out",
       true},
      {[](auto& options) { options.erase("amsgrad"); },
       "param_groups.0.amsgrad: missing", false},
      {[](auto& options) { options["lr"] = "fast"; }, "\"lr\" is not a number",
       false},
      {[](auto& options) { options["eps"] = std::nan(""); },
       "param_groups.0.eps: is not finite", false},
      {[](auto& options) { options["betas"] = Json::Array{0.5}; },
       "\"betas\" is not a pair", false},
      {[](auto& options) { options["amsgrad"] = true; },
       "missing: max_exp_avg_sq of c", false},
  };
  for (const auto& one : cases) {
    DcpOptimizer stored = Listed();
    one.change(stored.groups[0].options);
    EXPECT_THAT(
        ToAdamW(stored).status(),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("does not fit this one, of the class AdamW"),
                       HasSubstr(one.why))));
    EXPECT_EQ(ToAdamW(stored, /*strict=*/false).ok(), one.is_strict) << one.why;
  }
}

TEST(DcpRecordTest, StatesThatAreRefused) {
  EXPECT_THAT(
      ToAdamW(DcpOptimizer()).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("has no states of an optimizer: load the model alone, "
                         "by LoadModel()")));
  EXPECT_THAT(
      Translate<torch::optim::SGD>(Listed(), torch::optim::SGDOptions(1))
          .status(),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          AllOf(HasSubstr("this one, of the class SGD, which is as before:\n"),
                HasSubstr("no state named exp_avg\n"),
                HasSubstr("no state named exp_avg_sq\n"),
                HasSubstr("no state named step"),
                // Options of another class are no news then.
                Not(HasSubstr("missing")))));
  // Of one parameter some are missing; of another all are: it has not stepped.
  DcpOptimizer stored = Listed();
  stored.numbers.erase("b");
  stored.slots.clear();
  for (const char* const name : {"exp_avg", "exp_avg_sq"}) {
    AddState(stored, "tied", name);
  }
  stored.numbers.erase("c");
  ASSERT_OK(ToAdamW(stored));
  stored.numbers.erase("tied");
  EXPECT_THAT(ToAdamW(stored).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("missing: step of tied")));
}

TEST(DcpRecordTest, StatesThatAnRmspropNeeds) {
  DcpOptimizer stored;
  DcpGroup group = {{"a", "b"},
                    {{"lr", 1},
                     {"alpha", 0.5},
                     {"eps", 1},
                     {"weight_decay", 0},
                     {"momentum", 0.5},
                     {"centered", true}}};
  stored.groups = {group, group};
  stored.groups[1].names = {"c"};
  stored.groups[1].options["momentum"] = 0;
  stored.groups[1].options["centered"] = false;
  for (const char* const name : {"a", "c"}) {
    AddState(stored, name, "square_avg");
    stored.numbers[name]["step"] = 1;
  }
  EXPECT_THAT(
      Translate<torch::optim::RMSprop>(stored, torch::optim::RMSpropOptions(1))
          .status(),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          AllOf(HasSubstr("missing: momentum_buffer of a\n"),
                HasSubstr("missing: grad_avg of a"), Not(HasSubstr("of c")))));
}

}  // namespace
}  // namespace fsdp::checkpoint
