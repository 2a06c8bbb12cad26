// Runs the benchmark's code without a GPU.
#include <cmath>
#include <memory>

#include "base/testing/fake_device.h"
#include "base/testing/fake_device_graph.h"
#include "benchmarks/gpu_run.h"
#include "benchmarks/gpu_train_step_run.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FakeDeviceGraph;
using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;

TrainStepCase Tiny() {
  TrainStepCase what;
  what.model = {/*vocab=*/11, /*dim=*/6, /*layers=*/3, /*heads=*/2, /*seq=*/5};
  what.batch = 2;
  return what;
}

Figures FiguresOf(const TrainStepCase& what, const Place& place) {
  const std::unique_ptr<TurnRun> run = MakeTrainStepRun(what, place);
  for (int i = 0; i < 3; ++i) EXPECT_GT(run->Turn(), 0);
  return run->GetFigures();
}

void ExpectTimes(const Figures& figures) {
  for (const char* name :
       {"ms", "plain_ms", "of_plain", "host_us_per_unit", "tokens_per_s"}) {
    EXPECT_GT(figures.at(name), 0) << name;
    EXPECT_TRUE(std::isfinite(figures.at(name))) << name;
  }
}

class GpuTrainStepTest : public ::testing::Test {
 protected:
  // The device is registered before the first backward.
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_F(GpuTrainStepTest, BothTrainAlike) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool checkpointing : {false, true}) {
      TrainStepCase what = Tiny();
      what.dtype = dtype;
      what.checkpointing = checkpointing;
      const Figures figures = FiguresOf(what, Place());
      ExpectTimes(figures);
      EXPECT_LE(figures.at("loss_difference"),
                dtype == at::kFloat ? 1e-5 : 1e-2);
    }
  }
}

TEST_F(GpuTrainStepTest, AmongPlayedRanksThePlanIsKeptAndLossesAreNotCompared) {
  for (const int ranks : {2, 3}) {
    Place place;
    place.ranks = ranks;
    const Figures figures = FiguresOf(Tiny(), place);
    ExpectTimes(figures);
    EXPECT_NEAR(figures.at("of_plan"), 1, 0.02);
    EXPECT_THAT(figures, Not(Contains(Key("loss_difference"))));
  }
}

TEST_F(GpuTrainStepTest, CapturedStepsTrainAlike) {
  Place place;
  place.device = FakeDevice::device();
  TrainStepCase what = Tiny();
  what.make_graph = FakeDeviceGraph::Make;
  const Figures figures = FiguresOf(what, place);
  ExpectTimes(figures);
  EXPECT_LE(figures.at("loss_difference"), 1e-5);
}

TEST_F(GpuTrainStepTest, RunsOnADeviceWithStreams) {
  Place place;
  place.device = FakeDevice::device();
  const Figures figures = FiguresOf(Tiny(), place);
  ExpectTimes(figures);
  EXPECT_LE(figures.at("loss_difference"), 1e-5);
  EXPECT_THAT(figures, Not(Contains(Key("peak_MB"))))
      << "nobody counts the memory of this device";
}

}  // namespace
}  // namespace fsdp::benchmarks
