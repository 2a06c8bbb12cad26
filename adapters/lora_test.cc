#include "adapters/lora.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "adapters/linear.h"
#include "adapters/testing/adapted_net.h"
#include "base/files/testing/real_files.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::adapters::testing {
namespace {

using ::fsdp::checkpoint::LoadModel;
using ::fsdp::checkpoint::LoadModelOptions;
using ::fsdp::comm::Communicator;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::NamesIn;
using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::ElementsAre;
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

TEST(LoraTest, ALayerInTwoPlacesHasOneAdapter) {
  torch::nn::Module net;
  Linear layer(3, 4);
  net.register_module("a", layer);
  net.register_module("b", layer);
  LoraConfig config;
  config.targets = {"a", "b"};
  ASSERT_OK(AddLora(net, config));
  EXPECT_TRUE(layer->has_low_rank());
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
  const auto refused = [&](const LoraConfig& config, const std::string& text) {
    EXPECT_THAT(AddLora(*net, config), Invalid(text));
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
  EXPECT_THAT(AddLora(*plain, config), Invalid("no fsdp::adapters::Linear"));
  ASSERT_OK(AddLora(*net, OnQAndV()));
  EXPECT_THAT(AddLora(*net, OnQAndV()), Refused("has adapters already"));
  EXPECT_THAT(MergeLora(*MakeNet(1)), Refused("has no adapters"));
}

TEST(LoraTest, AShardedModelIsRefused) {
  EXPECT_OK(
      comm::testing::RunAllRanks(2, [](Communicator& world) -> absl::Status {
        const auto net = MakeNet(1);
        FSDP_RETURN_IF_ERROR(AddLora(*net, OnQAndV()));
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), BlockUnits()));
        EXPECT_THAT(AddLora(*model, OnQAndV()), Refused("before FullyShard()"));
        EXPECT_THAT(MergeLora(*net), Refused("part of a sharded model"));
        // A base that stays whole on each rank would not get the product.
        const auto other = MakeNet(1);
        FSDP_RETURN_IF_ERROR(AddLora(*other, OnQAndV()));
        Options options = BlockUnits();
        options.ignore.parameter = [](const std::string& name,
                                      const at::Tensor&) {
          return name == "layers.0.q_proj.weight";
        };
        FSDP_ASSIGN_OR_RETURN(auto partly,
                              FullyShard(other, Unowned(world), options));
        EXPECT_THAT(MergeLora(*partly),
                    Refused("layers.0.q_proj, whose weight is not sharded"));
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

// It would change the other layer, and no factor may be lost either.
TEST(LoraTest, AnAdapterOfATiedWeightIsNotMerged) {
  const auto merge = [](Communicator& world) -> absl::Status {
    constexpr char kText[] = "the weight of head is also embed.weight";
    const Linear embed(3, 3);
    const Linear head(3, 3);
    torch::nn::Sequential net;
    net->push_back("embed", embed);
    net->push_back("head", head);
    FSDP_RETURN_IF_ERROR(Tie(embed->weight, head->weight));
    LoraConfig config;
    config.targets = {"head"};
    FSDP_RETURN_IF_ERROR(AddLora(*net, config));
    FillFactors(*net);
    EXPECT_THAT(MergeLora(*net), Refused(kText));
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    FSDP_ASSIGN_OR_RETURN(const StateDict before, model->GatherStateDict());
    EXPECT_THAT(MergeLora(*model), Refused(kText));
    FSDP_ASSIGN_OR_RETURN(const StateDict after, model->GatherStateDict());
    EXPECT_TRUE(after.contains("head.lora_B.weight"));
    for (const auto& item : after) {
      EXPECT_TRUE(at::equal(item.value(), before[item.key()])) << item.key();
    }
    return absl::OkStatus();
  };
  EXPECT_OK(comm::testing::RunAllRanks(2, merge));
}

// The rest is held against Python's PEFT: testing/record_peft.py.

constexpr int64_t kSteps = 10;
constexpr int64_t kRows = 6;

std::string Recorded(const std::string& name) {
  return absl::StrCat("adapters/testing/recorded/", name);
}

// Of each step.
struct BatchesImpl : torch::nn::Module {
  at::Tensor x = register_buffer("x", at::zeros({kSteps, kRows, kDim}));
  at::Tensor y = register_buffer(
      "y", at::zeros({kSteps, kRows}, at::TensorOptions(at::kLong)));
};

std::vector<double> LossesOf(const std::string& folder) {
  std::vector<double> losses;
  const auto json = Json::Parse(ReadWholeFile(folder + "/losses.json"));
  EXPECT_OK(json);
  for (const Json& one : *json->As<Json::Array>()) {
    losses.push_back(one.NumberOr(-1));
  }
  return losses;
}

void ExpectClose(const torch::nn::Module& actual,
                 const torch::nn::Module& expected) {
  const auto values = ValuesOf(actual);
  ASSERT_EQ(values.size(), expected.named_parameters().size());
  for (const auto& [name, value] : ValuesOf(expected)) {
    EXPECT_TRUE(at::allclose(values.at(name), value, 1e-5, 1e-6))
        << name << " is off by "
        << (values.at(name) - value).abs().max().item<float>();
  }
}

absl::StatusOr<Model> Begin(Communicator& world, const std::string& folder,
                            const LoraConfig& config) {
  const auto net = MakeNet(1);
  FSDP_RETURN_IF_ERROR(AddLora(*net, config));
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(net, Unowned(world), BlockUnits()));
  LoadModelOptions options;
  options.mapping = OfBaseModel(*model);
  FSDP_RETURN_IF_ERROR(
      LoadModel(folder + "/base.safetensors", *model, options));
  FSDP_RETURN_IF_ERROR(LoadAdapter(folder + "/before", *model, config));
  return model;
}

// Ten steps of AdamW, each rank with its rows of the batches.
absl::Status Train(Communicator& world, const std::string& folder,
                   Model& model) {
  BatchesImpl batches;
  FSDP_RETURN_IF_ERROR(LoadModel(folder + "/batches.safetensors", batches));
  const std::vector<double> expected = LossesOf(folder);
  std::vector<at::Tensor> trained;
  for (const TensorRange& named : model->Ranges()) {
    if (named.values.requires_grad()) trained.push_back(named.values);
  }
  torch::optim::AdamW optimizer(
      trained, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  const int64_t rows = kRows / world.world_size();
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto mine = [&](const at::Tensor& batch) {
      return batch[step].narrow(0, rows * world.rank(), rows);
    };
    const at::Tensor loss = at::cross_entropy_loss(
        model->forward(mine(batches.x)), mine(batches.y));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    for (const TensorRange& named : model->Ranges()) {
      EXPECT_TRUE(named.values.requires_grad() ||
                  !named.values.grad().defined())
          << named.name;
    }
    optimizer.step();
    optimizer.zero_grad();
    FSDP_ASSIGN_OR_RETURN(const double mean,
                          comm::Mean(world, loss.item<double>()));
    EXPECT_NEAR(mean, expected.at(step), 1e-5) << "step " << step;
  }
  return absl::OkStatus();
}

class PeftTest : public ::testing::TestWithParam<std::string> {
 protected:
  const std::string folder_ = Recorded(GetParam());
};

INSTANTIATE_TEST_SUITE_P(All, PeftTest, ::testing::Values("lora", "rslora"));

TEST_P(PeftTest, TrainsSavesAndMergesAsPythonDoes) {
  const auto config = ReadLoraConfig(folder_ + "/before");
  ASSERT_OK(config);
  for (const int ranks : {1, 2, 3}) {
    const std::string root =
        EmptyFolder(absl::StrCat("peft_", GetParam(), ranks));
    const auto run = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto model, Begin(world, folder_, *config));
      FSDP_RETURN_IF_ERROR(Train(world, folder_, model));
      FSDP_RETURN_IF_ERROR(SaveAdapter(root + "/adapter", *model, *config));
      return ExportMerged(root + "/merged", *model);
    };
    ASSERT_OK(comm::testing::RunAllRanks(ranks, run)) << ranks;
    EXPECT_THAT(
        NamesIn(root + "/adapter"),
        ElementsAre("adapter_config.json", "adapter_model.safetensors"));
    const auto adapter = [&](const std::string& path) {
      auto net = MakeNet(1);
      const auto its = ReadLoraConfig(path);
      EXPECT_OK(its);
      EXPECT_OK(AddLora(*net, *its));
      EXPECT_OK(LoadAdapter(path, *net, *its));
      return net;
    };
    ExpectClose(*adapter(root + "/adapter"), *adapter(folder_ + "/after"));
    const auto actual = MakeNet(1);
    const auto expected = MakeNet(2);
    ASSERT_OK(LoadModel(root + "/merged", *actual));
    ASSERT_OK(LoadModel(folder_ + "/merged.safetensors", *expected));
    ExpectClose(*actual, *expected);
  }
}

TEST(PeftFilesTest, WhatDoesNotFitIsListed) {
  const std::string before = Recorded("lora/before");
  const auto config = ReadLoraConfig(before);
  ASSERT_OK(config);
  const auto net = MakeNet(1);
  LoraConfig other = *config;
  other.targets = {"layers.0.q_proj"};
  ASSERT_OK(AddLora(*net, other));
  // More than the model has.
  EXPECT_THAT(LoadAdapter(before, *net, other),
              Invalid("layers.1.q_proj.lora_A.weight"));
  const auto larger = MakeNet(1);
  other = *config;
  other.rank += 1;
  ASSERT_OK(AddLora(*larger, other));
  EXPECT_THAT(LoadAdapter(before, *larger, other),
              Invalid("layers.0.q_proj.lora_A.weight"));
}

TEST(PeftFilesTest, AFolderWithoutAnAdapterIsNamed) {
  const std::string root = EmptyFolder("no_adapter");
  EXPECT_THAT(ReadLoraConfig(root), StatusIs(absl::StatusCode::kNotFound,
                                             HasSubstr("adapter_config.json")));
  std::ofstream(root + "/adapter_config.json") << "{}";
  EXPECT_THAT(ReadLoraConfig(root),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(root), HasSubstr("peft_type"))));
  std::ofstream(root + "/adapter_config.json") << R"({"peft_type": "LORA")";
  EXPECT_THAT(ReadLoraConfig(root),
              Invalid("adapter_config.json: JSON, byte "));
}

TEST(PeftFilesTest, ARankThatTheFileDoesNotHaveTakesNoMemory) {
  const std::string root = EmptyFolder("huge_rank");
  LoraConfig config;
  config.rank = 3;
  config.targets = {"q_proj"};
  const auto net = MakeNet(1);
  ASSERT_OK(AddLora(*net, config));
  ASSERT_OK(SaveAdapter(root + "/a", *net, config));
  EXPECT_OK(ReadLoraConfig(root + "/a"));
  config.rank = 4;
  std::ofstream(root + "/a/adapter_config.json") << ToJson(config);
  EXPECT_THAT(ReadLoraConfig(root + "/a"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("a/adapter_config.json: r is 4"),
                             HasSubstr("the factors beside it have 3"))));
  std::ofstream(root + "/adapter_config.json") << ToJson(config);
  EXPECT_THAT(ReadLoraConfig(root),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("has no model")));
  // Layers have the rank of a pattern, if one matches.
  config.rank = 1 << 30;
  config.ranks = {{"nothing", 1}};
  std::ofstream(root + "/a/adapter_config.json") << ToJson(config);
  EXPECT_THAT(ReadLoraConfig(root + "/a"), Invalid("r is 1073741824"));
  config.ranks = {{"q_proj", 3}};
  std::ofstream(root + "/a/adapter_config.json") << ToJson(config);
  EXPECT_OK(ReadLoraConfig(root + "/a"));
}

// What is saved at one number of ranks, every other one loads, to the bit.
TEST(PeftFilesTest, AnAdapterDoesNotDependOnTheNumberOfRanks) {
  const std::string root = EmptyFolder("adapter_ranks");
  LoraConfig config;
  config.rank = 5;
  config.targets = {"o_proj"};
  config.trained_whole = {"layers.1.v_proj"};
  const auto with_values = [&](uint64_t seed) {
    auto net = MakeNet(seed);
    EXPECT_OK(AddLora(*net, config));
    const at::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters()) {
      if (IsFactor(item.key())) item.value().fill_(0.5 + double(seed));
    }
    return net;
  };
  const auto saved = with_values(1);
  ASSERT_OK(SaveAdapter(root + "/0", *saved, config));
  for (const int ranks : {1, 2, 3}) {
    const std::string to = absl::StrCat(root, "/", ranks);
    const auto run = [&](Communicator& world) -> absl::Status {
      const auto net = with_values(2);
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(net, Unowned(world), BlockUnits()));
      FSDP_RETURN_IF_ERROR(LoadAdapter(root + "/0", *model, config));
      return SaveAdapter(to, *model, config);
    };
    ASSERT_OK(comm::testing::RunAllRanks(ranks, run)) << ranks;
    EXPECT_EQ(ReadWholeFile(to + "/adapter_model.safetensors"),
              ReadWholeFile(root + "/0/adapter_model.safetensors"))
        << ranks;
  }
}

}  // namespace
}  // namespace fsdp::adapters::testing
