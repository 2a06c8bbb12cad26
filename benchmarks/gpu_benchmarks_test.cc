// Runs the code of the benchmarks for a GPU without one.
#include "benchmarks/gpu_benchmarks.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <cmath>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "fsdp/deferred/deferred_tensor.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FakeDeviceGraph;
using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;

constexpr gpt::GptConfig kTiny = {/*vocab=*/11, /*dim=*/6, /*layers=*/3,
                                  /*heads=*/2, /*seq=*/5};

Place OnFakeDevice() {
  Place place;
  place.device = FakeDevice::device();
  return place;
}

// Of three turns.
Figures FiguresOf(const std::unique_ptr<TurnRun>& run) {
  for (int i = 0; i < 3; ++i) EXPECT_GT(run->Turn(), 0);
  Figures figures = run->GetFigures();
  for (const auto& [name, value] : figures) {
    EXPECT_TRUE(std::isfinite(value)) << name;
  }
  return figures;
}

void ExpectPositive(const Figures& figures,
                    const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    EXPECT_GT(figures.at(name), 0) << name;
  }
}

class GpuBenchmarksTest : public ::testing::Test {
 protected:
  // The device is registered before the first backward.
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

// Matrices are large enough to be deferred.
constexpr gpt::GptConfig kConfig = {/*vocab=*/512, /*dim=*/128, /*layers=*/2,
                                    /*heads=*/2, /*seq=*/256};

std::shared_ptr<gpt::GptImpl> Make(const Place& place, at::ScalarType dtype) {
  return MakeOn(place, dtype, [] {
    return std::make_shared<gpt::GptImpl>(kConfig, /*checkpointing=*/false);
  });
}

TEST_F(GpuBenchmarksTest, MatricesHaveNoMemoryBeforeTheyAreWanted) {
  const auto model = Make(Place(), at::kBFloat16);
  int deferred = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
    if (IsDeferred(parameter)) ++deferred;
  }
  EXPECT_EQ(deferred, 3 + 2 * 3);
}

TEST_F(GpuBenchmarksTest, ADeviceOfWhichThisMachineHasNone) {
  Place place;
  place.device = c10::Device(c10::kCUDA, 0);
  const auto linear = MakeOn(place, at::kFloat, [] {
    return torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false))
        .ptr();
  });
  EXPECT_EQ(linear->weight.device(), place.device);
  EXPECT_TRUE(IsDeferred(linear->weight));
}

TEST_F(GpuBenchmarksTest, TwoHaveTheSameValuesAndTheyAreAsLayersDrawThem) {
  const auto one = Make(Place(), at::kFloat);
  const auto other = Make(Place(), at::kFloat);
  ASSERT_OK(Materialize(*one));
  ASSERT_OK(Materialize(*other));
  const auto values = one->named_parameters();
  for (const auto& named : other->named_parameters()) {
    EXPECT_TRUE(at::equal(values[named.key()], named.value())) << named.key();
  }
  // Values are uniform below 1 / sqrt(inputs); the deviation is that over
  // sqrt(3).
  const at::Tensor& linear = values["blocks.1.fc.weight"];
  EXPECT_LE(linear.abs().max().item<double>(), 1 / std::sqrt(128.0));
  EXPECT_NEAR(linear.std().item<double>(), 1 / std::sqrt(3 * 128.0), 1e-3);
  EXPECT_NEAR(values["wte.weight"].std().item<double>(), 1, 0.02);
  EXPECT_TRUE(at::equal(values["ln.weight"], at::ones({128})));
  EXPECT_FALSE(
      at::equal(values["blocks.0.fc.weight"], values["blocks.1.fc.weight"]));
}

TEST_F(GpuBenchmarksTest, TheDeviceItselfDraws) {
  const Place place = OnFakeDevice();
  FakeDevice::Reset();
  const auto model = Make(place, at::kFloat);
  ASSERT_OK(Materialize(*model));
  EXPECT_EQ(FakeDevice::HostWaits(), std::vector<std::string>());
  const auto values = Make(Place(), at::kFloat);
  ASSERT_OK(Materialize(*values));
  // Random numbers are the CPU's.
  const auto expected = values->named_parameters();
  for (const auto& named : model->named_parameters()) {
    EXPECT_EQ(named.value().device(), place.device);
    EXPECT_TRUE(named.value().requires_grad());
    EXPECT_TRUE(at::equal(named.value().cpu(), expected[named.key()]))
        << named.key();
  }
}

TrainStepCase TinySteps() {
  TrainStepCase what;
  what.model = kTiny;
  what.batch = 2;
  return what;
}

Figures StepFigures(const TrainStepCase& what, const Place& place) {
  Figures figures = FiguresOf(MakeTrainStepRun(what, place));
  ExpectPositive(figures, {"ms", "plain_ms", "of_plain", "host_us_per_unit",
                           "tokens_per_s"});
  return figures;
}

TEST_F(GpuBenchmarksTest, BothTrainAlike) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool checkpointing : {false, true}) {
      TrainStepCase what = TinySteps();
      what.dtype = dtype;
      what.checkpointing = checkpointing;
      const Figures figures = StepFigures(what, Place());
      EXPECT_LE(figures.at("loss_difference"),
                dtype == at::kFloat ? 1e-5 : 1e-2);
    }
  }
}

TEST_F(GpuBenchmarksTest,
       AmongPlayedRanksThePlanIsKeptAndLossesAreNotCompared) {
  for (const int ranks : {2, 3}) {
    Place place;
    place.ranks = ranks;
    const Figures figures = StepFigures(TinySteps(), place);
    EXPECT_NEAR(figures.at("of_plan"), 1, 0.02);
    EXPECT_THAT(figures, Not(Contains(Key("loss_difference"))));
  }
}

TEST_F(GpuBenchmarksTest, StepsOnADeviceTrainAlikeAlsoWhereTheyAreCaptured) {
  for (const bool captured : {false, true}) {
    TrainStepCase what = TinySteps();
    if (captured) what.make_graph = FakeDeviceGraph::Make;
    const Figures figures = StepFigures(what, OnFakeDevice());
    EXPECT_LE(figures.at("loss_difference"), 1e-5);
    EXPECT_THAT(figures, Not(Contains(Key("peak_MB"))))
        << "nobody counts the memory of this device";
  }
}

ShardedStepCase TinySharded() {
  ShardedStepCase what;
  what.model = kTiny;
  what.batch = 2;
  what.clip = 0.5;
  return what;
}

Figures FiguresOf(const ShardedStepCase& what, const Place& place) {
  return FiguresOf(MakeShardedStepRun(what, place));
}

TEST_F(GpuBenchmarksTest, CountsParametersTokensAndOperations) {
  ShardedStepCase what = TinySharded();
  what.micro_batches = 3;
  const Figures figures = FiguresOf(what, Place());
  // Embeddings and head, then 12 dim^2 + 13 dim for each block, and the norm.
  const double parameters = (11 + 5 + 11) * 6 + 3 * (12 * 36 + 13 * 6) + 2 * 6;
  EXPECT_DOUBLE_EQ(figures.at("parameters"), parameters / 1e9);
  EXPECT_EQ(figures.at("tokens_per_step"), 3 * 2 * 5);
  EXPECT_NEAR(figures.at("TFLOPS"),
              6 * parameters * figures.at("tokens_per_s") / 1e12, 1e-15);
  EXPECT_NEAR(figures.at("ms") * figures.at("tokens_per_s"), 1e3 * 30, 1e-6);
  EXPECT_THAT(figures, Not(Contains(Key("optimizer_ms"))));
}

TEST_F(GpuBenchmarksTest, WhereStatesRestAndWhatIsKeptChangesNoLoss) {
  const double resident =
      FiguresOf(TinySharded(), OnFakeDevice()).at("last_loss");
  for (const bool all : {false, true}) {
    ShardedStepCase what = TinySharded();
    what.recompute = true;
    what.offload.optimizer = Tier::kCpu;
    if (all) what.offload.parameters = what.offload.gradients = Tier::kCpu;
    const Figures figures = FiguresOf(what, OnFakeDevice());
    EXPECT_EQ(figures.at("last_loss"), resident) << all;
    EXPECT_GT(figures.at("optimizer_ms"), 0);
    EXPECT_LT(figures.at("optimizer_ms"), figures.at("ms"));
  }
}

TEST_F(GpuBenchmarksTest, MicroBatchesOfTheSameRowsAddUpToOneStep) {
  ShardedStepCase what = TinySharded();
  const double once = FiguresOf(what, OnFakeDevice()).at("last_loss");
  what.micro_batches = 2;
  EXPECT_NEAR(FiguresOf(what, OnFakeDevice()).at("last_loss"), once, 1e-5);
}

TEST_F(GpuBenchmarksTest, ComparesTheOptimizerWithACopy) {
  for (const Place& place : {Place(), OnFakeDevice()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Figures figures = FiguresOf(MakeOptimizerRun(kTiny, dtype, place));
      ExpectPositive(figures, {"ms", "of_copy"});
    }
  }
}

TEST_F(GpuBenchmarksTest, OffloadedModelsTrainAsResidentOnesDo) {
  for (const StepOn step_on : {StepOn::kDevice, StepOn::kHost}) {
    OffloadCase what;
    what.units = 3;
    what.dim = 7;
    what.rows = 5;
    what.step_on = step_on;
    const Figures figures = FiguresOf(MakeOffloadRun(what, OnFakeDevice()));
    ExpectPositive(figures, {"ms", "resident_ms", "optimizer_ms", "of_resident",
                             "optimizer_of_resident", "GB/s"});
    EXPECT_LE(figures.at("loss_difference"), 1e-5);
  }
}

}  // namespace
}  // namespace fsdp::benchmarks
