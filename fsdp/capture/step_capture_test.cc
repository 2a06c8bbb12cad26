// Compares captured steps with eager ones, on a device with streams, as one of
// N ranks.
#include "fsdp/capture/step_capture.h"

#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <stdexcept>

#include "base/testing/fake_device.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/captured_training.h"
#include "fsdp/testing/device_programs.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = Training::kDim;

absl::StatusOr<std::unique_ptr<CapturedStep>> CaptureOf(Training& training) {
  return CapturedStep::Make(*training.model, *training.optimizer, training.step,
                            CapturedOnTheFakeDevice());
}

void ExpectSameBits(const std::vector<at::Tensor>& actual,
                    const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i], expected[i]))
        << i << ": " << actual[i] - expected[i];
  }
}

class StepCaptureTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
  StepCaptureTest() { FakeDevice::Reset(); }

  // Starts two equal trainings, and the first one's captured step.
  void StartBoth(
      int world_size = 2,
      const std::function<void(Options&)>& configure = [](Options&) {}) {
    ASSERT_OK_AND_ASSIGN(captured_,
                         StartTraining(DeviceProgram(), world_size, configure));
    ASSERT_OK_AND_ASSIGN(eager_,
                         StartTraining(DeviceProgram(), world_size, configure));
    ASSERT_OK_AND_ASSIGN(step_, CaptureOf(*captured_));
  }

  // Runs the next step of both and expects equal losses.
  void StepBoth() {
    captured_->SetRate(steps_);
    ASSERT_OK_AND_ASSIGN(const at::Tensor actual,
                         step_->Run({Training::Batch(steps_)}));
    ASSERT_OK_AND_ASSIGN(const at::Tensor expected, eager_->RunEagerly(steps_));
    EXPECT_TRUE(at::equal(actual.cpu(), expected.detach().cpu())) << steps_;
    ++steps_;
  }
  void StepBoth(int count) {
    for (int i = 0; i < count; ++i) ASSERT_NO_FATAL_FAILURE(StepBoth());
  }
  void ExpectSameShards() {
    ExpectSameBits(captured_->Shards(), eager_->Shards());
  }

  int steps_ = 0;
  std::unique_ptr<Training> captured_;
  std::unique_ptr<Training> eager_;
  std::unique_ptr<CapturedStep> step_;
};

// Returns false if the host does something else in each step, or moves
// something.
bool IsCapturable(const DeviceProgram& program) {
  for (const char* part :
       {"Cpu", "Stores", "OnTheDevice", "Summoned", "AskedForThenWritten"}) {
    if (absl::StrContains(program.name, part)) return false;
  }
  return true;
}

std::vector<DeviceProgram> CapturablePrograms() {
  std::vector<DeviceProgram> programs;
  for (DeviceProgram& program : DevicePrograms()) {
    if (IsCapturable(program)) programs.push_back(std::move(program));
  }
  return programs;
}

class CapturedProgramTest
    : public ::testing::TestWithParam<std::tuple<DeviceProgram, int>> {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_P(CapturedProgramTest, ReplaysHaveTheBitsOfStepsThatRun) {
  constexpr int kSteps = 7;
  const auto& [program, world_size] = GetParam();
  FakeDevice::Reset();
  ASSERT_OK_AND_ASSIGN(const auto eager, StartTraining(program, world_size));
  ASSERT_OK_AND_ASSIGN(const auto captured, StartTraining(program, world_size));
  ASSERT_OK_AND_ASSIGN(const auto step, CaptureOf(*captured));
  for (int i = 0; i < kSteps; ++i) {
    ASSERT_OK_AND_ASSIGN(const at::Tensor expected, eager->RunEagerly(i));
    captured->SetRate(i);
    const at::Tensor batch = Training::Batch(i);
    const size_t waits = FakeDevice::HostWaits().size();
    ASSERT_OK_AND_ASSIGN(const at::Tensor actual, step->Run({batch}));
    if (i > 0) {
      EXPECT_EQ(FakeDevice::HostWaits().size(), waits) << i;
    }
    EXPECT_TRUE(at::equal(actual.cpu(), expected.detach().cpu()))
        << i << ": " << actual.cpu() << expected.cpu();
  }
  EXPECT_EQ(step->replays(), kSteps - 3);
  ExpectSameBits(captured->Shards(), eager->Shards());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    All, CapturedProgramTest,
    ::testing::Combine(::testing::ValuesIn(CapturablePrograms()),
                       ::testing::Values(1, 2, 3)),
    [](const auto& info) { return NameOfCase(info.param); });

TEST_F(StepCaptureTest, MomentumOfSgd) {
  StartBoth();
  for (Training* training : {captured_.get(), eager_.get()}) {
    training->optimizer = std::make_unique<FusedSGD>(
        training->model->Parameters(),
        torch::optim::SGDOptions(1e-2).momentum(0.9));
  }
  ASSERT_OK_AND_ASSIGN(step_, CaptureOf(*captured_));
  StepBoth(6);
  ExpectSameShards();
}

TEST_F(StepCaptureTest, StateDictsBetweenReplays) {
  StartBoth();
  StepBoth(5);
  ASSERT_OK_AND_ASSIGN(const auto dict, captured_->model->GatherStateDict());
  ASSERT_OK_AND_ASSIGN(
      const OptimizerStateDict states,
      captured_->model->GatherOptimizerState(*captured_->optimizer));
  StepBoth(2);
  // Both go back, and so do their numbers of steps.
  for (Training* training : {captured_.get(), eager_.get()}) {
    ASSERT_OK(training->model->LoadStateDict(dict));
    ASSERT_OK(
        training->model->LoadOptimizerState(*training->optimizer, states));
  }
  StepBoth(2);
  ExpectSameShards();
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(StepCaptureTest, EvaluationAndStepsThatRunBetweenReplays) {
  StartBoth();
  StepBoth(5);
  for (Training* training : {captured_.get(), eager_.get()}) {
    const c10::NoGradGuard no_grad;
    training->model->forward(Training::Batch(50));
  }
  StepBoth();
  const int step = steps_++;
  ASSERT_OK(captured_->RunEagerly(step).status());
  ASSERT_OK(eager_->RunEagerly(step).status());
  StepBoth(2);
  ExpectSameShards();
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(StepCaptureTest, AStepThatFailsBetweenReplaysTakesNoMemoryAway) {
  StartBoth(2, [](Options& options) { options.abort_on_failure = false; });
  StepBoth(5);
  EXPECT_ANY_THROW(captured_->model->forward(at::zeros(
      {3, kDim + 1}, at::TensorOptions().device(FakeDevice::device()))));
  const at::Tensor out = captured_->model->forward(Training::Batch(3));
  out.register_hook([](const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("the user's");
  });
  EXPECT_FALSE(captured_->model->Backward(out.sum()).ok());
  captured_->optimizer->zero_grad();
  StepBoth(2);
  ExpectSameShards();
}

TEST_F(StepCaptureTest, AGraphOfBeforeAReplayIsStale) {
  StartBoth();
  StepBoth(5);
  const at::Tensor loss =
      Loss(captured_->model->forward(Training::Batch(9)), Training::Batch(9));
  StepBoth();
  EXPECT_FALSE(captured_->model->Backward(loss).ok());
}

TEST_F(StepCaptureTest, EveryCaptureIsOfTheSameOperationsOnTheSameMemory) {
  for (const int world_size : {1, 2, 3}) {
    ASSERT_OK_AND_ASSIGN(const auto training,
                         StartTraining(DeviceProgram(), world_size));
    const FakeDeviceGraph* graph = nullptr;
    CaptureOptions options;
    options.make_graph = [&](c10::Device device) {
      auto made = FakeDeviceGraph::Make(device);
      graph = static_cast<const FakeDeviceGraph*>(made->get());
      return made;
    };
    ASSERT_OK_AND_ASSIGN(
        const auto step,
        CapturedStep::Make(*training->model, *training->optimizer,
                           training->step, options));
    for (int i = 0; i < 4; ++i)
      ASSERT_OK(step->Run({Training::Batch(i)}).status());
    const std::vector<std::string> first = graph->Operations();
    EXPECT_GT(first.size(), 100);
    for (int i = 4; i < 6; ++i) {
      step->Recapture();
      for (int k = 0; k < 4; ++k)
        ASSERT_OK(step->Run({Training::Batch(i)}).status());
      EXPECT_EQ(graph->Operations(), first) << world_size;
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
