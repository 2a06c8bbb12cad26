// Compares with transformers and PEFT, trained by plain PyTorch and by its
// FSDP2 (examples/llama/testing/record_training.py).
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "adapters/lora.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/model_files.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/testing/numbered_rows.h"
#include "examples/llama/testing/recorded_files.h"
#include "examples/llama/training/model.h"
#include "examples/llama/training/trainer.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::adapters::LoadAdapter;
using ::fsdp::adapters::LoraConfig;
using ::fsdp::adapters::ReadLoraConfig;
using ::fsdp::checkpoint::LoadModel;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;

constexpr int64_t kSteps = 10, kRows = 12, kTokens = 16;
constexpr uint64_t kSeed = 1;

// It holds batches.safetensors: a file has what a module has.
struct RecordedBatches : torch::nn::Module {
  at::Tensor tokens =
      register_buffer("tokens", at::zeros({kSteps, kRows, kTokens}, at::kLong));
  at::Tensor targets = register_buffer(
      "targets", at::zeros({kSteps, kRows, kTokens}, at::kLong));
};

// Returns the row of each place of the first epoch.
std::vector<int64_t> OrderOf(int64_t num_rows) {
  auto batches = TokenBatches::Create(std::make_shared<NumberedRows>(num_rows),
                                      {num_rows, 0, 1}, kSeed);
  EXPECT_OK(batches);
  const auto batch = batches->Next();
  EXPECT_OK(batch);
  return NumbersOf(batch->tokens);
}

// Has the rows of all steps in the order in which TokenBatches takes them.
class RecordedRows final : public RowSource {
 public:
  RecordedRows() : places_(num_rows()) {
    EXPECT_OK(LoadModel(Recorded("batches.safetensors"), batches_));
    const std::vector<int64_t> order = OrderOf(num_rows());
    for (int64_t i = 0; i < num_rows(); ++i) places_[order[i]] = i;
  }

  int64_t seq() const override { return kTokens; }
  int64_t num_rows() const override { return kSteps * kRows; }
  absl::Status Read(int64_t index, Row& row) const override {
    const int64_t first = places_[index] * kTokens;
    std::copy_n(batches_.tokens.const_data_ptr<int64_t>() + first, kTokens,
                row.tokens.begin());
    std::copy_n(batches_.targets.const_data_ptr<int64_t>() + first, kTokens,
                row.targets.begin());
    return absl::OkStatus();
  }

 private:
  RecordedBatches batches_;
  std::vector<int64_t> places_;
};

// What has been trained, and trained.json.
struct Training {
  std::string model;                        // a folder
  std::optional<std::string> adapter = {};  // a folder
  Json figures;
};

struct Result {
  std::vector<double> losses;
  std::vector<double> grad_norms;
  fsdp::StateDict weights;
};

TrainerOptions OptionsOf(const Json& figures) {
  const auto number = [&](absl::string_view key) {
    return figures.Find(key)->NumberOr(-1);
  };
  TrainerOptions options;
  options.learning_rate = number("learning_rate");
  options.schedule = {static_cast<int64_t>(number("warmup")), kSteps,
                      number("floor")};
  options.weight_decay = number("weight_decay");
  options.max_grad_norm = number("clip");
  return options;
}

absl::StatusOr<Model> Begin(const Training& training,
                            const std::shared_ptr<Communicator>& ranks) {
  FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ReadConfig(training.model));
  ModelOptions options;
  if (training.adapter.has_value()) {
    FSDP_ASSIGN_OR_RETURN(options.lora, ReadLoraConfig(*training.adapter));
  }
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(config, options, ranks));
  FSDP_RETURN_IF_ERROR(LoadBase(training.model, config, *model));
  if (!training.adapter.has_value()) return model;
  FSDP_RETURN_IF_ERROR(LoadAdapter(*training.adapter, *model, *options.lora));
  return model;
}

absl::StatusOr<Result> Train(const Training& training, Communicator& world) {
  const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
  FSDP_ASSIGN_OR_RETURN(Model model, Begin(training, own));
  FSDP_ASSIGN_OR_RETURN(
      TokenBatches data,
      TokenBatches::Create(std::make_shared<RecordedRows>(),
                           {kRows, world.rank(), world.world_size()}, kSeed));
  Trainer trainer(model, &data, own, OptionsOf(training.figures));
  Result result;
  for (int64_t step = 0; step < kSteps; ++step) {
    FSDP_ASSIGN_OR_RETURN(const StepResult its, trainer.Step(step));
    result.losses.push_back(its.loss);
    result.grad_norms.push_back(its.grad_norm);
  }
  FSDP_ASSIGN_OR_RETURN(result.weights, model->GatherStateDict());
  return result;
}

// Returns the result of rank 0.
Result TrainOn(int ranks, const Training& training) {
  Result result;
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Result mine, Train(training, world));
    if (world.rank() == 0) result = std::move(mine);
    return absl::OkStatus();
  }));
  return result;
}

double LargestDifference(const std::vector<double>& a,
                         const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]));
  }
  return largest;
}

void ExpectFigures(const Result& actual, const Json& recorded) {
  const double losses =
      LargestDifference(actual.losses, NumbersIn(*recorded.Find("losses")));
  const double norms = LargestDifference(
      actual.grad_norms, NumbersIn(*recorded.Find("grad_norms")));
  ::testing::Test::RecordProperty("losses", absl::StrCat(losses));
  ::testing::Test::RecordProperty("grad_norms", absl::StrCat(norms));
  EXPECT_LT(losses, 1e-5);
  EXPECT_LT(norms, 5e-5);  // norms are up to 5
}

class RecordedTrainingTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

INSTANTIATE_TEST_SUITE_P(
    Models, RecordedTrainingTest,
    ::testing::Combine(::testing::Values("llama_scaled_rope", "llama_tied",
                                         "qwen2", "qwen3"),
                       ::testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param),
                          "_ranks");
    });

TEST_P(RecordedTrainingTest, TrainsAsPyTorchDoes) {
  const auto& [name, ranks] = GetParam();
  const std::string folder = Recorded(name);
  const Training training = {folder, {}, RecordedJson(name + "/trained.json")};
  const Result result = TrainOn(ranks, training);
  ExpectFigures(result, training.figures);
  ASSERT_OK_AND_ASSIGN(const LlamaConfig config, ReadConfig(folder));
  CausalLm expected(config);
  ASSERT_OK(LoadModel(absl::StrCat(folder, "/trained.safetensors"), *expected));
  ExpectCloseWeights(result.weights, expected->named_parameters(),
                     /*key_bias_bound=*/1e-3);
}

class RecordedAdapterTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RecordedAdapterTest, ::testing::Values(1, 2, 3),
                         ::testing::PrintToStringParamName());

TEST_P(RecordedAdapterTest, TrainsAsPeftDoes) {
  const Training training = {Recorded("llama_scaled_rope"),
                             Recorded("lora/before"),
                             RecordedJson("lora/trained.json")};
  const Result result = TrainOn(GetParam(), training);
  ExpectFigures(result, training.figures);
  const std::string after = Recorded("lora/after");
  ASSERT_OK_AND_ASSIGN(const LlamaConfig config, ReadConfig(training.model));
  ASSERT_OK_AND_ASSIGN(LoraConfig lora, ReadLoraConfig(after));
  // PEFT takes the layers of the file for all.
  lora.targets = {fsdp::adapters::kAllLinear};
  CausalLm expected(config);
  ASSERT_OK(fsdp::adapters::AddLora(*expected, lora));
  ASSERT_OK(LoadBase(training.model, config, *expected));
  ASSERT_OK(LoadAdapter(after, *expected, lora));
  ExpectCloseWeights(result.weights, expected->named_parameters(),
                     /*key_bias_bound=*/1e-3);
}

}  // namespace
}  // namespace llama
