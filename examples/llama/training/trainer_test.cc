// Compares with one rank that trains on one large batch, whose steps
// recorded_training_test compares with PyTorch's.
#include "examples/llama/training/trainer.h"

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/accumulate.h>

#include <csignal>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "adapters/lora.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "comm/agreement.h"
#include "comm/launcher/launch_options.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/testing/numbered_rows.h"
#include "examples/llama/testing/recorded_files.h"
#include "fsdp/testing/memory_meter.h"
#include "ranges/tensor_range.h"

namespace llama {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
      "initializer_range": 0.2, "tie_word_embeddings": false})");
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

struct Trained {
  std::vector<double> losses;
  std::vector<double> norms;
  fsdp::StateDict values;
};

// Trains on `rows` of all ranks per backward, and measures all rows.
absl::StatusOr<Trained> Train(Communicator& world, const ModelOptions& options,
                              const TrainerOptions& training, int64_t rows) {
  const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), options, own));
  const BatchShare share = {rows, world.rank(), world.world_size()};
  TokenBatches data = BatchesOf(share);
  Trainer trainer(model, &data, own, training);
  Trained trained;
  for (int64_t step = 0; step < kSteps; ++step) {
    FSDP_ASSIGN_OR_RETURN(const StepResult result, trainer.Step(step));
    trained.losses.push_back(result.loss);
    trained.norms.push_back(result.grad_norm);
    EXPECT_EQ(result.tokens, rows * training.micro_batches * kSeq);
    EXPECT_GT(result.targets, 0);
    EXPECT_LT(result.targets, result.tokens);
  }
  const auto source = std::make_shared<UnevenRows>();
  FSDP_ASSIGN_OR_RETURN(const double evaluation,
                        trainer.Evaluate({source, share}));
  FSDP_ASSIGN_OR_RETURN(const Batch all,
                        ReadBatch(*source, {0, 1, 2, 3, 4, 5, 6}));
  const c10::NoGradGuard no_grad;
  EXPECT_NEAR(
      evaluation,
      model->forward(all.tokens, all.starts, all.targets).item<double>(),
      options.compute == at::kFloat ? 1e-5 : 0.05);
  FSDP_ASSIGN_OR_RETURN(trained.values, model->GatherStateDict());
  return trained;
}

// Are micro-batches, and whether all but the last leave gradients whole.
class TrainerTest : public ::testing::TestWithParam<std::pair<int64_t, bool>> {
};

INSTANTIATE_TEST_SUITE_P(MicroBatches, TrainerTest,
                         ::testing::Values(std::pair(1, false),
                                           std::pair(2, false),
                                           std::pair(2, true)));

TEST_P(TrainerTest, TrainsAsOneRankWithOneLargeBatch) {
  const auto [micro_batches, no_sync] = GetParam();
  TrainerOptions training = OptionsOf(micro_batches);
  training.no_sync = no_sync;
  Trained expected;
  EXPECT_OK(
      RunAllRanks(1, [&, rows = kBatch * micro_batches](Communicator& world) {
        auto trained = Train(world, {}, OptionsOf(1), rows);
        if (trained.ok()) expected = *trained;
        return trained.status();
      }));
  for (const int ranks : {1, 2, 3}) {
    const auto train = [&](Communicator& world) -> absl::Status {
      ModelOptions options;
      if (ranks == 3) {
        options.automatic.emplace().memory_bytes = int64_t{1} << 30;
        options.automatic->rows = kBatch / ranks;
        options.seq = kSeq;
      }
      FSDP_ASSIGN_OR_RETURN(const Trained trained,
                            Train(world, options, training, kBatch));
      for (int64_t step = 0; step < kSteps; ++step) {
        EXPECT_NEAR(trained.losses[step], expected.losses[step], 1e-5) << step;
        EXPECT_NEAR(trained.norms[step], expected.norms[step], 1e-4) << step;
      }
      ExpectCloseWeights(trained.values, expected.values,
                         /*key_bias_bound=*/1e-4);
      return absl::OkStatus();
    };
    EXPECT_OK(RunAllRanks(ranks, train)) << ranks;
  }
}

// A step that is left out takes no step of the schedule, either.
TEST(TrainerModelTest, ASignalEndsAnEvaluationAndTheScheduleCountsSteps) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(TinyConfig(), {}, own));
    const BatchShare share = {kBatch, world.rank(), 2};
    TokenBatches data = BatchesOf(share);
    Trainer trainer(model, &data, own, OptionsOf(1));
    fsdp::checkpoint::TrainingRun run;
    run.model = model.get();
    fsdp::checkpoint::RunGuardOptions options;
    options.max_skipped = 1;
    fsdp::checkpoint::RunGuard guard(own, nullptr, &run, options);
    FSDP_ASSIGN_OR_RETURN(const StepResult first, trainer.Step(0, &guard));
    const auto values = [&] { return model->Ranges().front().values.detach(); };
    const at::Tensor kept = values().clone();
    values().fill_(std::numeric_limits<float>::quiet_NaN());
    FSDP_ASSIGN_OR_RETURN(const StepResult second, trainer.Step(1, &guard));
    EXPECT_TRUE(second.left_out);
    values().copy_(kept);
    FSDP_ASSIGN_OR_RETURN(const StepResult third, trainer.Step(2, &guard));
    EXPECT_FALSE(third.left_out);
    EXPECT_NE(first.learning_rate, second.learning_rate);
    EXPECT_EQ(third.learning_rate, second.learning_rate);
    const auto source = std::make_shared<UnevenRows>();
    FSDP_RETURN_IF_ERROR(trainer.Evaluate({source, share}).status());
    std::optional<fsdp::comm::StopRequest> stop;
    const absl::Time deadline = absl::Now() + world.default_timeout();
    if (world.rank() == 1) {
      stop.emplace();
      EXPECT_EQ(std::raise(SIGTERM), 0);
    }
    FSDP_RETURN_IF_ERROR(fsdp::comm::Barrier(world, "told", deadline));
    EXPECT_THAT(trainer.Evaluate({source, share}),
                StatusIs(absl::StatusCode::kCancelled, HasSubstr("to stop")));
    return fsdp::comm::Barrier(world, "ended", deadline);
  }));
}

TEST(TrainerModelTest, RecomputationChangesNoBit) {
  std::vector<std::vector<double>> losses;
  for (const bool recompute : {false, true}) {
    ModelOptions options;
    options.recompute = recompute;
    options.compute = at::kBFloat16;
    std::vector<double>& mine = losses.emplace_back();
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Trained trained,
                            Train(world, options, OptionsOf(1), kBatch));
      if (world.rank() == 0) mine = trained.losses;
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

// The second word is the first of the strategy.
std::vector<std::string> UnitsIn(const Model& model) {
  const std::vector<std::string> lines =
      absl::StrSplit(model->Describe(), '\n');
  std::vector<std::string> units;
  for (size_t i = 1; !absl::StartsWith(lines.at(i), "memory of"); ++i) {
    const std::vector<std::string> words =
        absl::StrSplit(lines[i], ' ', absl::SkipEmpty());
    units.push_back(absl::StrCat(words.at(0), " ", words.at(1)));
  }
  return units;
}

TEST(TrainerModelTest, AnEmbeddingAndAHeadThatAreNotTiedAreUnits) {
  LlamaConfig config = TinyConfig();
  for (const bool is_tied : {false, true}) {
    config.tie_word_embeddings = is_tied;
    EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
      const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
      FSDP_ASSIGN_OR_RETURN(const Model model, MakeModel(config, {}, own));
      if (is_tied) {
        EXPECT_THAT(UnitsIn(model),
                    ElementsAre("root full", "model.layers.0 full",
                                "model.layers.1 full"));
      } else {
        EXPECT_THAT(UnitsIn(model),
                    ElementsAre("root full", "model.embed_tokens full",
                                "model.layers.0 full", "model.layers.1 full",
                                "lm_head shard"));
      }
      return absl::OkStatus();
    }));
  }
}

TEST(TrainerModelTest, GradientsOfEmbeddingAndHeadAreNotWholeAtATime) {
  LlamaConfig config = TinyConfig();
  config.vocab_size = 512;
  constexpr int64_t kOne = int64_t{512} * 24 * 4;  // 3 times a layer's bytes
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(config, {}, own));
    const at::Tensor tokens = at::arange(8).view({2, 4});
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(tokens, DocumentStarts(), tokens)));
    for (const int64_t peak :
         {model->memory_stats().gradients.peak_in_use_bytes,
          model->PlanMemory().in_flight}) {
      EXPECT_GE(peak, kOne);
      EXPECT_LT(peak, 2 * kOne);
    }
    return absl::OkStatus();
  }));
}

TEST(TrainerModelTest, ALayerThatComputesWithoutAnAdapterGetsNone) {
  LlamaConfig config = TinyConfig();
  ModelOptions options;
  options.lora.emplace().targets = {"q_proj", "lm_head"};
  EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    for (const bool is_tied : {false, true}) {
      config.tie_word_embeddings = is_tied;
      EXPECT_THAT(
          MakeModel(config, options, own),
          StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("lm_head")));
    }
    return absl::OkStatus();
  }));
}

// The options that are printed are those of the model.
TEST(TrainerModelTest, AHeadHasTheStrategyThatWasChosen) {
  ModelOptions options;
  options.automatic.emplace().memory_bytes = int64_t{1} << 30;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(const Model model,
                          MakeModel(TinyConfig(), options, own));
    std::set<std::string> strategies;
    for (const std::string& unit : UnitsIn(model)) {
      strategies.insert(unit.substr(unit.find(' ')));
    }
    EXPECT_THAT(strategies, ::testing::SizeIs(1));
    return absl::OkStatus();
  }));
}

struct Held {
  int64_t planned = 0;
  int64_t held = 0;
  int64_t shards = 0;
};

// Returns what rank 0 of two holds while adapters are trained. Rows are so
// short that computing with them takes nothing beside the model.
Held MeasureAdapters(bool is_int8) {
  const auto config = ParseLlamaConfig(R"({
      "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
      "intermediate_size": 704, "num_hidden_layers": 4,
      "num_attention_heads": 4, "num_key_value_heads": 2})");
  EXPECT_OK(config);
  ModelOptions options;
  options.compute = at::kBFloat16;
  options.lora.emplace().targets = {fsdp::adapters::kAllLinear};
  if (is_int8) options.int8_base.emplace();
  Held first;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const auto meter = std::make_shared<fsdp::testing::MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(*config, options, own));
    FSDP_ASSIGN_OR_RETURN(
        TokenBatches data,
        TokenBatches::Create(std::make_shared<NumberedRows>(2),
                             {2, world.rank(), 2}, kSeed));
    Trainer trainer(model, &data, own, TrainerOptions());
    for (int64_t step = 0; step < 3; ++step) {
      FSDP_RETURN_IF_ERROR(trainer.Step(step).status());
    }
    const fsdp::MemoryPlan plan = model->PlanMemory();
    if (world.rank() == 0) first = {plan.total(), meter->live(), plan.shards};
    return absl::OkStatus();
  }));
  return first;
}

// Between two steps shards, factors with their states and gradients, and
// buffers live; the allocator counts them.
TEST(AdapterMemoryTest, ARankHoldsWhatIsPlannedAndHalfOfItIfTheBaseIsInt8) {
  const Held numbers = MeasureAdapters(/*is_int8=*/false);
  const Held int8 = MeasureAdapters(/*is_int8=*/true);
  // Beside two layers, which are gathered at a time, a free buffer is kept for
  // the next embedding or head.
  constexpr int64_t kKept = int64_t{512} * 256 * 2;
  for (const Held& held : {numbers, int8}) {
    EXPECT_NEAR(static_cast<double>(held.held - kKept) /
                    static_cast<double>(held.planned),
                1, 0.001)
        << held.held << " held, " << held.planned << " planned";
  }
  // A weight is 1 byte and a 64th of a 4-byte scale instead of 2 bytes.
  constexpr int64_t kOfLayer =
      int64_t{256} * (256 * 2 + 128 * 2 + 3 * 704);  // attention and MLP
  constexpr int64_t kSaved = 4 * kOfLayer * (64 - 4) / 64 / 2;
  const int64_t saved = numbers.shards - int8.shards;
  EXPECT_NEAR(static_cast<double>(saved) / kSaved, 1, 0.001);
}

}  // namespace
}  // namespace llama
