#include "adapters/lora.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <set>
#include <string>

#include "absl/status/status.h"
#include "adapters/linear.h"
#include "adapters/testing/adapted_net.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::adapters::testing::BlockUnits;
using ::fsdp::adapters::testing::MakeNet;
using ::fsdp::adapters::testing::Values;
using ::fsdp::adapters::testing::ValuesOf;
using ::fsdp::comm::Communicator;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

LoraConfig OnQAndV() {
  LoraConfig config;
  config.rank = 3;
  config.alpha = 6;
  config.targets = {"q_proj", "v_proj"};
  return config;
}

std::set<std::string> Trained(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad()) names.insert(item.key());
  }
  return names;
}

// As if the second factors had learned something.
void FillFactors(torch::nn::Module& module) {
  const c10::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    if (IsFactor(item.key())) item.value().normal_(0, 0.3);
  }
}

TEST(LoraTest, TrainsTheFactorsAlone) {
  const auto net = MakeNet(1);
  const size_t before = net->parameters().size();
  ASSERT_OK(AddLora(*net, OnQAndV()));
  EXPECT_EQ(net->parameters().size(), before + 8);
  EXPECT_THAT(
      Trained(*net),
      UnorderedElementsAre(
          "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight",
          "layers.0.v_proj.lora_A.weight", "layers.0.v_proj.lora_B.weight",
          "layers.1.q_proj.lora_A.weight", "layers.1.q_proj.lora_B.weight",
          "layers.1.v_proj.lora_A.weight", "layers.1.v_proj.lora_B.weight"));
}

TEST(LoraTest, TrainsWholeWhatIsNamed) {
  const auto net = MakeNet(1);
  LoraConfig config = OnQAndV();
  config.targets = {"layers.1.o_proj"};
  config.trained_whole = {"head"};
  ASSERT_OK(AddLora(*net, config));
  EXPECT_THAT(Trained(*net),
              UnorderedElementsAre("layers.1.o_proj.lora_A.weight",
                                   "layers.1.o_proj.lora_B.weight",
                                   "head.weight", "head.bias"));
}

TEST(LoraTest, AllLinearIsAllButTheHeadOfALanguageModel) {
  torch::nn::Sequential net;
  net->push_back("fc", Linear(2, 3));
  net->push_back("lm_head", Linear(3, 4));
  LoraConfig config;
  config.targets = {kAllLinear};
  ASSERT_OK(AddLora(*net, config));
  EXPECT_THAT(Trained(*net),
              UnorderedElementsAre("fc.lora_A.weight", "fc.lora_B.weight"));
}

TEST(LoraTest, RefusesWhatCannotHaveAnAdapter) {
  const auto net = MakeNet(1);
  const auto refused = [&](LoraConfig config, const std::string& text) {
    EXPECT_THAT(AddLora(*net, config),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
    EXPECT_EQ(Trained(*net).size(), net->parameters().size());
  };
  LoraConfig config = OnQAndV();
  config.targets = {"q_proj", "k_proj"};
  refused(config, "k_proj: the model has no module of that name");
  config.targets = {"layers.0"};
  refused(config, "an adapter of layers.0");
  config = OnQAndV();
  config.trained_whole = {"lm_head"};
  refused(config, "lm_head");
  config = OnQAndV();
  config.rank = 0;
  refused(config, "rank 0");
  torch::nn::Sequential plain(torch::nn::Linear(2, 3));
  config = OnQAndV();
  config.targets = {kAllLinear};
  EXPECT_THAT(AddLora(*plain, config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no fsdp::adapters::Linear")));
  ASSERT_OK(AddLora(*net, OnQAndV()));
  EXPECT_THAT(AddLora(*net, OnQAndV()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has adapters already")));
  EXPECT_THAT(MergeLora(*MakeNet(1)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has no adapters")));
}

TEST(LoraTest, AShardedModelIsRefused) {
  EXPECT_OK(
      comm::testing::RunAllRanks(2, [](Communicator& world) -> absl::Status {
        const auto net = MakeNet(1);
        FSDP_RETURN_IF_ERROR(AddLora(*net, OnQAndV()));
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), BlockUnits()));
        EXPECT_THAT(AddLora(*model, OnQAndV()),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("before FullyShard()")));
        EXPECT_THAT(MergeLora(*net),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("part of a sharded model")));
        return absl::OkStatus();
      }));
}

TEST(LoraTest, MergedShardsHaveTheBitsOfTheMergedModel) {
  const auto whole = MakeNet(1);
  ASSERT_OK(AddLora(*whole, OnQAndV()));
  FillFactors(*whole);
  const Values before = ValuesOf(*whole);
  ASSERT_OK(MergeLora(*whole));
  const Values after = ValuesOf(*whole);
  for (const int ranks : {1, 2, 3}) {
    const auto merge = [&](Communicator& world) -> absl::Status {
      const auto net = MakeNet(2);
      FSDP_RETURN_IF_ERROR(AddLora(*net, OnQAndV()));
      {
        const c10::NoGradGuard no_grad;
        for (const auto& item : net->named_parameters()) {
          item.value().copy_(before.at(item.key()));
        }
      }
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(net, Unowned(world), BlockUnits()));
      FSDP_RETURN_IF_ERROR(MergeLora(*model));
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      EXPECT_EQ(dict.size(), after.size());
      for (const auto& item : dict) {
        EXPECT_TRUE(at::equal(item.value(), after.at(item.key())))
            << item.key();
      }
      return absl::OkStatus();
    };
    EXPECT_OK(comm::testing::RunAllRanks(ranks, merge)) << ranks;
  }
}

}  // namespace
}  // namespace fsdp::adapters
