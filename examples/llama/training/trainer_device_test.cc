// Steps on a device with streams: nothing is unordered, the host only polls for
// the loss, and a captured step has the numbers of one that runs.
#include <ATen/Context.h>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/loopback_communicator.h"
#include "examples/llama/testing/numbered_rows.h"
#include "examples/llama/training/trainer.h"

namespace llama {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FakeDeviceGraph;
using ::testing::IsEmpty;

constexpr int64_t kSteps = 6;

// Returns losses and norms of the steps, of which the first two allocate.
absl::StatusOr<std::vector<double>> Train(const ModelOptions& options,
                                          bool captures) {
  fsdp::comm::LoopbackOptions loopback;
  loopback.device = options.device;
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<fsdp::comm::Communicator> ranks,
                        fsdp::comm::CreateLoopback(loopback));
  FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ParseLlamaConfig(R"({
      "model_type": "llama", "vocab_size": 128, "hidden_size": 16,
      "intermediate_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 2, "num_key_value_heads": 2})"));
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(config, options, ranks));
  FSDP_ASSIGN_OR_RETURN(TokenBatches data,
                        TokenBatches::Create(std::make_shared<NumberedRows>(
                                                 /*num_rows=*/12, /*seq=*/8),
                                             {2, 0, 1}, 3));
  TrainerOptions training;
  // A captured step takes a float.
  training.learning_rate = 0.0078125;
  training.schedule = {/*warm_up=*/0, kSteps, /*floor=*/1};
  training.micro_batches = 2;
  training.no_sync = true;
  training.device = options.device;
  Trainer trainer(model, &data, ranks, training);
  if (captures) {
    FSDP_RETURN_IF_ERROR(trainer.Capture(FakeDeviceGraph::Make));
  }
  std::vector<double> numbers;
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step == 2) FakeDevice::Reset();
    FSDP_ASSIGN_OR_RETURN(const StepResult result, trainer.Step(step));
    numbers.insert(numbers.end(), {result.loss, result.grad_norm});
  }
  return numbers;
}

TEST(TrainerDeviceTest, TheHostWaitsForNothingButTheLoss) {
  FakeDevice::Register();
  // Only the CPU has it, and it rounds otherwise.
  at::globalContext().setSDPUseFlash(false);
  ModelOptions options;
  options.recompute = true;
  ASSERT_OK_AND_ASSIGN(const std::vector<double> expected,
                       Train(options, /*captures=*/false));
  options.device = FakeDevice::device();
  for (const bool captures : {false, true}) {
    FakeDevice::Reset();
    ASSERT_OK_AND_ASSIGN(const std::vector<double> numbers,
                         Train(options, captures));
    EXPECT_EQ(numbers, expected);
    EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
    EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  }
}

}  // namespace
}  // namespace llama
