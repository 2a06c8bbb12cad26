#include "adapters/lora.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "adapters/linear.h"
#include "adapters/testing/adapted_net.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::adapters::testing::BlockUnits;
using ::fsdp::adapters::testing::kDim;
using ::fsdp::adapters::testing::MakeNet;
using ::fsdp::adapters::testing::NetImpl;
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

TEST(LoraTest, ComputesWhatItDidUntilItLearns) {
  const at::NoGradGuard no_grad;
  const auto net = MakeNet(1);
  const at::Tensor x = at::randn({4, kDim});
  const at::Tensor before = net->forward(x);
  ASSERT_OK(AddLora(*net, OnQAndV()));
  EXPECT_TRUE(at::equal(net->forward(x), before));
  FillFactors(*net);
  EXPECT_FALSE(at::allclose(net->forward(x), before));
}

// Against the formula.
TEST(LoraTest, AddsTheScaledProduct) {
  const at::NoGradGuard no_grad;
  Linear layer(5, 7);
  LowRankOptions options;
  options.rank = 2;
  options.scale = 1.5;
  layer->AddLowRank(options);
  FillFactors(*layer);
  const auto parameters = layer->named_parameters();
  const at::Tensor& a = parameters["lora_A.weight"];
  const at::Tensor& b = parameters["lora_B.weight"];
  const at::Tensor x = at::randn({3, 2, 5});
  const at::Tensor expected =
      at::matmul(x, (layer->weight + 1.5 * at::matmul(b, a)).t()) + layer->bias;
  EXPECT_TRUE(at::allclose(layer(x), expected, 1e-5, 1e-6));
  layer->Merge();
  EXPECT_TRUE(at::allclose(layer(x), expected, 1e-5, 1e-6));
  EXPECT_TRUE(at::equal(b, at::zeros_like(b)));
}

TEST(LoraTest, FactorsAreFloatUnlessAskedOtherwise) {
  const at::NoGradGuard no_grad;
  Linear layer(5, 7);
  layer->to(at::kBFloat16);
  layer->AddLowRank({});
  EXPECT_EQ(layer->named_parameters()["lora_A.weight"].scalar_type(),
            at::kFloat);
  EXPECT_EQ(layer(at::randn({3, 5}, at::kBFloat16)).scalar_type(),
            at::kBFloat16);
}

// The first factor is that of PyTorch's Linear: uniform in +-1 / sqrt(in).
TEST(LoraTest, FirstFactorsAreRandomSecondOnesZero) {
  torch::manual_seed(1);
  Linear layer(400, 3);
  LowRankOptions options;
  options.rank = 50;
  layer->AddLowRank(options);
  const auto parameters = layer->named_parameters();
  const at::Tensor a = parameters["lora_A.weight"].detach();
  EXPECT_LE(a.abs().max().item<float>(), 0.05f);
  EXPECT_NEAR(a.mean().item<float>(), 0, 1e-3);
  EXPECT_NEAR(a.std().item<float>(), 0.05 / std::sqrt(3), 1e-3);
  EXPECT_EQ(parameters["lora_B.weight"].abs().max().item<float>(), 0);
}

TEST(LoraTest, DropsInputsOfTheAdapterInTraining) {
  const at::NoGradGuard no_grad;
  Linear layer(64, 3);
  LowRankOptions options;
  options.dropout = 0.5;
  layer->AddLowRank(options);
  FillFactors(*layer);
  const at::Tensor x = at::randn({4, 64});
  EXPECT_FALSE(at::equal(layer(x), layer(x)));
  layer->eval();
  EXPECT_TRUE(at::equal(layer(x), layer(x)));
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

using Values = std::map<std::string, at::Tensor>;

Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  return values;
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

TEST(LoraTest, AModelWithoutMemoryGetsAdaptersToo) {
  std::shared_ptr<NetImpl> net;
  {
    DeferredInitOptions options;
    options.min_bytes = 0;
    const DeferredInit deferred(options);
    net = std::make_shared<NetImpl>();
    ASSERT_OK(AddLora(*net, OnQAndV()));
  }
  ASSERT_OK(Materialize(*net));
  const auto parameters = net->named_parameters();
  const at::Tensor a = parameters["layers.1.v_proj.lora_A.weight"].detach();
  EXPECT_GT(a.abs().max().item<float>(), 0.1f);
  EXPECT_LE(a.abs().max().item<float>(), 0.25f);
  EXPECT_EQ(
      parameters["layers.1.v_proj.lora_B.weight"].abs().max().item<float>(), 0);
  EXPECT_EQ(Trained(*net).size(), 8);
}

}  // namespace
}  // namespace fsdp::adapters
