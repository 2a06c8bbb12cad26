// Compares what a rank holds while adapters are trained with what is planned.
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "adapters/lora_config.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "examples/llama/training/trainer.h"
#include "fsdp/testing/memory_meter.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::testing::MemoryMeter;

LlamaConfig Config() {
  const auto config = ParseLlamaConfig(R"({
      "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
      "intermediate_size": 704, "num_hidden_layers": 4,
      "num_attention_heads": 4, "num_key_value_heads": 2})");
  EXPECT_OK(config);
  return *config;
}

// Rows are so short that computing with them takes nothing beside the model.
class ShortRows final : public RowSource {
 public:
  int64_t seq() const override { return 2; }
  int64_t num_rows() const override { return 2; }
  absl::Status Read(int64_t index, Row& row) const override {
    for (int64_t i = 0; i < seq(); ++i) {
      row.tokens.at(i) = 1 + index + i;
      row.targets.at(i) = 2 + index + i;
    }
    return absl::OkStatus();
  }
};

struct Held {
  int64_t planned = 0;
  int64_t held = 0;
  int64_t shards = 0;
};

absl::Status Measure(Communicator& world, const ModelOptions& options,
                     Held* result) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(Config(), options, own));
  FSDP_ASSIGN_OR_RETURN(TokenBatches data,
                        TokenBatches::Create(std::make_shared<ShortRows>(),
                                             {world.world_size(), world.rank(),
                                              world.world_size()},
                                             /*seed=*/1));
  Trainer trainer(model, &data, own, TrainerOptions());
  for (int64_t step = 0; step < 3; ++step) {
    FSDP_RETURN_IF_ERROR(trainer.Step(step).status());
  }
  const fsdp::MemoryPlan plan = model->PlanMemory();
  *result = {plan.total(), meter->live(), plan.shards};
  return absl::OkStatus();
}

// Returns what rank 0 of two measures.
Held MeasureOnTwoRanks(bool is_int8) {
  ModelOptions options;
  options.compute = at::kBFloat16;
  options.lora.emplace().targets = {fsdp::adapters::kAllLinear};
  if (is_int8) options.int8_base.emplace();
  Held first;
  EXPECT_OK(fsdp::comm::testing::RunAllRanks(
      2, [&](Communicator& world) -> absl::Status {
        Held mine;
        FSDP_RETURN_IF_ERROR(Measure(world, options, &mine));
        if (world.rank() == 0) first = mine;
        return absl::OkStatus();
      }));
  return first;
}

// Between two steps shards, factors with their states and gradients, and
// buffers live; the allocator counts them.
TEST(AdapterMemoryTest, ARankHoldsWhatIsPlannedAndHalfOfItIfTheBaseIsInt8) {
  const Held numbers = MeasureOnTwoRanks(/*is_int8=*/false);
  const Held int8 = MeasureOnTwoRanks(/*is_int8=*/true);
  for (const Held& held : {numbers, int8}) {
    EXPECT_NEAR(
        static_cast<double>(held.held) / static_cast<double>(held.planned), 1,
        0.02)
        << held.held << " held, " << held.planned << " planned";
  }
  // A weight is 1 byte and a 64th of a 4-byte scale instead of 2 bytes.
  constexpr int64_t kOfLayer =
      256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 704;  // attention and MLP
  constexpr int64_t kSaved = 4 * kOfLayer * (64 - 4) / 64 / 2;
  const int64_t saved = numbers.shards - int8.shards;
  EXPECT_NEAR(static_cast<double>(saved) / kSaved, 1, 0.001);
}

}  // namespace
}  // namespace llama
