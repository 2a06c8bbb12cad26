// Compares with plain LibTorch: one process, one large batch, all logits.
#include "examples/llama/training/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/accumulate.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "adapters/lora_config.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/model_files.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/testing/memory_meter.h"
#include "gtest/gtest.h"
#include "ranges/tensor_range.h"

namespace llama {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;

constexpr int64_t kSeq = 12;
constexpr int64_t kRows = 7;
constexpr int64_t kBatch = 6;  // of all ranks
constexpr int64_t kSteps = 4;
constexpr uint64_t kSeed = 5;

LlamaConfig TinyConfig() {
  const auto config = ParseLlamaConfig(R"({
      "model_type": "qwen2", "vocab_size": 40, "hidden_size": 24,
      "intermediate_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2,
      "tie_word_embeddings": false})");
  EXPECT_OK(config);
  return *config;
}

// Row i has i + 1 targets and, if i is odd, two documents.
class UnevenRows final : public RowSource {
 public:
  int64_t seq() const override { return kSeq; }
  int64_t num_rows() const override { return kRows; }
  absl::Status Read(int64_t index, Row& row) const override {
    for (int64_t i = 0; i < kSeq; ++i) {
      row.tokens.at(i) = (index * 17 + i * i * 3 + 1) % 40;
      row.targets.at(i) = i <= index
                              ? (index * 17 + (i + 1) * (i + 1) * 3 + 1) % 40
                              : kNoTarget;
    }
    if (index % 2 == 1) row.documents = {0, 1 + index / 2};
    return absl::OkStatus();
  }
};

TokenBatches BatchesOf(const BatchShare& share) {
  auto batches =
      TokenBatches::Create(std::make_shared<UnevenRows>(), share, kSeed);
  EXPECT_OK(batches);
  return *std::move(batches);
}

TrainerOptions OptionsOf(int64_t micro_batches) {
  TrainerOptions options;
  options.learning_rate = 1e-2;
  options.schedule = {/*warm_up=*/2, kSteps, /*floor=*/0.1};
  options.max_grad_norm = 0.5;
  options.micro_batches = micro_batches;
  return options;
}

// Returns a sum over all rows of a batch that may be backpropagated.
at::Tensor SumOfLosses(CausalLm& net, const Batch& batch) {
  const at::Tensor logits = net->forward(batch.tokens, StartsOf(batch));
  return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten(),
                                /*weight=*/{}, at::Reduction::Sum, kNoTarget);
}

std::map<std::string, at::Tensor> ValuesOf(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  return values;
}

struct Expected {
  int64_t micro_batches = 1;
  std::string initial;  // a file
  std::vector<double> losses;
  std::vector<double> norms;
  double evaluation = 0;
  std::map<std::string, at::Tensor> values;
};

double PlainEvaluation(CausalLm& net) {
  const c10::NoGradGuard no_grad;
  const auto batches =
      EvaluationBatches::Create(std::make_shared<UnevenRows>(), {kRows, 0, 1});
  EXPECT_OK(batches);
  const auto batch = batches->Read(0);
  EXPECT_OK(batch);
  return SumOfLosses(net, *batch).item<double>() /
         static_cast<double>(CountTargets(*batch));
}

Expected TrainPlain(int64_t micro_batches) {
  CausalLm net(TinyConfig());
  Expected expected;
  expected.micro_batches = micro_batches;
  {
    const c10::NoGradGuard no_grad;
    // The default generator, which ranks share, would draw others in every run.
    at::Generator generator = at::detail::createCPUGenerator(1);
    for (const at::Tensor& parameter : net->parameters()) {
      at::Tensor(parameter).normal_(0, 0.2, generator);
    }
  }
  expected.initial = absl::StrCat(::testing::TempDir(), "/initial_",
                                  micro_batches, ".safetensors");
  EXPECT_OK(fsdp::checkpoint::ExportFile(expected.initial, *net));
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const auto& item : net->named_parameters()) {
    const bool decays = !absl::StrContains(item.key(), "norm") &&
                        !absl::EndsWith(item.key(), "bias");
    (decays ? matrices : others).push_back(item.value());
  }
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      matrices, std::make_unique<AdamWOptions>(
                    AdamWOptions(1).betas({0.9, 0.95}).weight_decay(0.1)));
  groups.emplace_back(others,
                      std::make_unique<AdamWOptions>(
                          AdamWOptions(1).betas({0.9, 0.95}).weight_decay(0)));
  torch::optim::AdamW optimizer(groups, AdamWOptions(1));
  TokenBatches data = BatchesOf({kBatch, 0, 1});
  const double rates[] = {5e-3, 1e-2, 1e-2, 1e-3 + 9e-3 * 0.5};
  for (const double rate : rates) {
    at::Tensor sum;
    double targets = 0;
    for (int64_t i = 0; i < micro_batches; ++i) {
      const auto batch = data.Next();
      EXPECT_OK(batch);
      const at::Tensor one = SumOfLosses(net, *batch);
      sum = sum.defined() ? sum + one : one;
      targets += static_cast<double>(CountTargets(*batch));
    }
    const at::Tensor loss = sum / targets;
    expected.losses.push_back(loss.item<double>());
    optimizer.zero_grad();
    loss.backward();
    expected.norms.push_back(
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5));
    for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
    optimizer.step();
  }
  expected.evaluation = PlainEvaluation(net);
  expected.values = ValuesOf(*net);
  return expected;
}

absl::Status ExpectValues(Model& model,
                          const std::map<std::string, at::Tensor>& expected) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::StateDict dict, model->GatherStateDict());
  EXPECT_EQ(dict.size(), expected.size());
  for (const auto& item : dict) {
    EXPECT_TRUE(at::allclose(item.value(), expected.at(item.key()), 1e-4, 1e-5))
        << item.key() << " is off by "
        << (item.value() - expected.at(item.key())).abs().max().item<float>();
  }
  return absl::OkStatus();
}

// Are micro-batches, and whether all but the last leave gradients whole.
class TrainerTest : public ::testing::TestWithParam<std::pair<int64_t, bool>> {
};

INSTANTIATE_TEST_SUITE_P(MicroBatches, TrainerTest,
                         ::testing::Values(std::pair(1, false),
                                           std::pair(2, false),
                                           std::pair(2, true)));

TEST_P(TrainerTest, TrainsAsOneProcessWithOneLargeBatch) {
  const auto [micro_batches, no_sync] = GetParam();
  const Expected expected = TrainPlain(micro_batches);
  TrainerOptions training = OptionsOf(micro_batches);
  training.no_sync = no_sync;
  for (const int ranks : {1, 2, 3}) {
    const auto train = [&](Communicator& world) -> absl::Status {
      const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
      ModelOptions options;
      std::ostringstream considered;
      if (ranks == 3) {
        options.automatic = {int64_t{1} << 30, kBatch / ranks, kSeq, 1,
                             &considered};
      }
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), options, own));
      EXPECT_EQ(absl::StrContains(considered.str(), "chosen"),
                ranks == 3 && world.rank() == 0);
      FSDP_RETURN_IF_ERROR(
          fsdp::checkpoint::LoadModel(expected.initial, *model));
      TokenBatches data = BatchesOf({kBatch, world.rank(), world.world_size()});
      Trainer trainer(model, &data, own, training);
      for (int64_t step = 0; step < kSteps; ++step) {
        FSDP_ASSIGN_OR_RETURN(const StepResult result, trainer.Step(step));
        EXPECT_NEAR(result.loss, expected.losses[step], 1e-5) << step;
        EXPECT_NEAR(result.grad_norm, expected.norms[step], 1e-4) << step;
        EXPECT_EQ(result.tokens, kBatch * expected.micro_batches * kSeq);
        EXPECT_GT(result.targets, 0);
        EXPECT_LT(result.targets, result.tokens);
      }
      const auto rows =
          EvaluationBatches::Create(std::make_shared<UnevenRows>(),
                                    {kBatch, world.rank(), world.world_size()});
      FSDP_RETURN_IF_ERROR(rows.status());
      FSDP_ASSIGN_OR_RETURN(const double evaluation, trainer.Evaluate(*rows));
      EXPECT_NEAR(evaluation, expected.evaluation, 1e-5);
      return ExpectValues(model, expected.values);
    };
    EXPECT_OK(RunAllRanks(ranks, train)) << ranks;
  }
}

TEST(TrainerModelTest, RecomputationChangesNoBit) {
  const std::string initial = TrainPlain(/*micro_batches=*/1).initial;
  std::vector<std::vector<double>> losses;
  for (const bool recompute : {false, true}) {
    ModelOptions options;
    options.recompute = recompute;
    options.compute = at::kBFloat16;
    std::vector<double>& mine = losses.emplace_back();
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), options, own));
      FSDP_RETURN_IF_ERROR(fsdp::checkpoint::LoadModel(initial, *model));
      TokenBatches data = BatchesOf({kBatch, world.rank(), 2});
      Trainer trainer(model, &data, own, OptionsOf(1));
      for (int64_t step = 0; step < kSteps; ++step) {
        FSDP_ASSIGN_OR_RETURN(const StepResult result, trainer.Step(step));
        if (world.rank() == 0) mine.push_back(result.loss);
      }
      return absl::OkStatus();
    }));
  }
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(TrainerModelTest, MicroBatchesTakeNoMoreThanOneUnlessGradientsStayWhole) {
  LlamaConfig config = TinyConfig();
  config.num_hidden_layers = 12;  // few of them are reduced at a time
  std::map<std::pair<int64_t, bool>, int64_t> peaks;
  int64_t whole = 0;
  for (const auto& [micro_batches, no_sync] :
       {std::pair(1, false), std::pair(4, false), std::pair(4, true)}) {
    const std::pair<int64_t, bool> key = {micro_batches, no_sync};
    TrainerOptions training = OptionsOf(micro_batches);
    training.no_sync = no_sync;
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(config, {}, own));
      TokenBatches data = BatchesOf({kBatch, world.rank(), 2});
      Trainer trainer(model, &data, own, training);
      const auto meter = std::make_shared<fsdp::testing::MemoryMeter>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                      meter);
      for (int64_t step = 0; step < 2; ++step) {
        FSDP_RETURN_IF_ERROR(trainer.Step(step).status());
      }
      if (world.rank() != 0) return absl::OkStatus();
      peaks[key] = meter->peak();
      whole = 0;
      for (const fsdp::TensorRange& named : model->Ranges()) {
        whole += c10::multiply_integers(named.sizes) * int64_t{4};
      }
      return absl::OkStatus();
    }));
  }
  const int64_t one = peaks[{1, false}];
  EXPECT_LT(peaks[std::pair(int64_t{4}, false)], one + whole / 4);
  EXPECT_GT(peaks[std::pair(int64_t{4}, true)], one + whole / 4);
}

// Every rank computes the initial values of its own shards.
TEST(TrainerModelTest, HasTheSameInitialValuesOnAnyNumberOfRanks) {
  const auto values = [](int count) {
    std::map<std::string, at::Tensor> found;
    EXPECT_OK(RunAllRanks(count, [&](Communicator& world) -> absl::Status {
      const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), {}, own));
      FSDP_ASSIGN_OR_RETURN(const fsdp::StateDict dict,
                            model->GatherStateDict());
      if (world.rank() != 0) return absl::OkStatus();
      for (const auto& item : dict) found[item.key()] = item.value();
      return absl::OkStatus();
    }));
    return found;
  };
  const auto one = values(1), two = values(2);
  EXPECT_EQ(one.size(), two.size());
  for (const auto& [name, value] : one) {
    EXPECT_TRUE(value.equal(two.at(name))) << name;
  }
}

// The base is frozen in bfloat16, and the loss goes down all the same.
TEST(TrainerModelTest, AdaptersLearnOnAFrozenBase) {
  ModelOptions options;
  options.compute = at::kBFloat16;
  options.lora.emplace();
  options.lora->rank = 4;
  options.lora->targets = {fsdp::adapters::kAllLinear};
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), options, own));
    for (const fsdp::TensorRange& named : model->Ranges()) {
      const bool is_factor = absl::StrContains(named.name, ".lora_");
      EXPECT_EQ(named.values.requires_grad(), is_factor) << named.name;
      EXPECT_EQ(named.values.scalar_type(),
                is_factor ? at::kFloat : at::kBFloat16)
          << named.name;
    }
    FSDP_ASSIGN_OR_RETURN(const fsdp::StateDict before,
                          model->GatherStateDict());
    TokenBatches data = BatchesOf({kBatch, world.rank(), 2});
    TrainerOptions training = OptionsOf(1);
    training.learning_rate = 3e-2;
    training.schedule = {/*warm_up=*/0, /*steps=*/60, /*floor=*/1};
    Trainer trainer(model, &data, own, training);
    double first = 0;
    double last = 0;
    for (int64_t step = 0; step < 60; ++step) {
      FSDP_ASSIGN_OR_RETURN(const StepResult result, trainer.Step(step));
      (step == 0 ? first : last) = result.loss;
    }
    EXPECT_LT(last, first - 0.2);
    FSDP_ASSIGN_OR_RETURN(const fsdp::StateDict after,
                          model->GatherStateDict());
    for (const auto& item : after) {
      const bool is_factor = absl::StrContains(item.key(), ".lora_");
      EXPECT_EQ(at::equal(item.value(), before[item.key()]), !is_factor)
          << item.key();
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace llama
