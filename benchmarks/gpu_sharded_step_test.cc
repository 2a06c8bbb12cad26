// Runs the code of the benchmarks of sharded steps without a GPU.
#include <cmath>
#include <memory>

#include "base/testing/fake_device.h"
#include "benchmarks/gpu_offload_run.h"
#include "benchmarks/gpu_run.h"
#include "benchmarks/gpu_sharded_step_run.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;

constexpr int kTurns = 3;

ShardedStepCase Tiny() {
  ShardedStepCase what;
  what.model = {/*vocab=*/11, /*dim=*/6, /*layers=*/3, /*heads=*/2, /*seq=*/5};
  what.batch = 2;
  what.clip = 0.5;
  return what;
}

class GpuShardedStepTest : public ::testing::Test {
 protected:
  // The device is registered before the first backward.
  static void SetUpTestSuite() { FakeDevice::Register(); }

  static Place OnFakeDevice() {
    Place place;
    place.device = FakeDevice::device();
    return place;
  }

  static Figures FiguresOf(TurnRun& run) {
    for (int i = 0; i < kTurns; ++i) EXPECT_GT(run.Turn(), 0);
    Figures figures = run.GetFigures();
    for (const auto& [name, value] : figures) {
      EXPECT_TRUE(std::isfinite(value)) << name;
    }
    return figures;
  }

  static Figures FiguresOf(const ShardedStepCase& what, const Place& place) {
    return FiguresOf(*MakeShardedStepRun(what, place));
  }
};

TEST_F(GpuShardedStepTest, CountsParametersTokensAndOperations) {
  ShardedStepCase what = Tiny();
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

TEST_F(GpuShardedStepTest, WhereStatesRestAndWhatIsKeptChangesNoLoss) {
  const double resident = FiguresOf(Tiny(), OnFakeDevice()).at("last_loss");
  for (const bool all : {false, true}) {
    ShardedStepCase what = Tiny();
    what.recompute = true;
    what.offload.optimizer = Tier::kCpu;
    if (all) what.offload.parameters = what.offload.gradients = Tier::kCpu;
    const Figures figures = FiguresOf(what, OnFakeDevice());
    EXPECT_EQ(figures.at("last_loss"), resident) << all;
    EXPECT_GT(figures.at("optimizer_ms"), 0);
    EXPECT_LT(figures.at("optimizer_ms"), figures.at("ms"));
  }
}

TEST_F(GpuShardedStepTest, MicroBatchesOfTheSameRowsAddUpToOneStep) {
  ShardedStepCase what = Tiny();
  const double once = FiguresOf(what, OnFakeDevice()).at("last_loss");
  what.micro_batches = 2;
  EXPECT_NEAR(FiguresOf(what, OnFakeDevice()).at("last_loss"), once, 1e-5);
}

TEST_F(GpuShardedStepTest, ComparesTheOptimizerWithACopy) {
  for (const Place& place : {Place(), OnFakeDevice()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Figures figures =
          FiguresOf(*MakeOptimizerRun(Tiny().model, dtype, place));
      EXPECT_GT(figures.at("ms"), 0);
      EXPECT_GT(figures.at("of_copy"), 0);
    }
  }
}

}  // namespace
}  // namespace fsdp::benchmarks
