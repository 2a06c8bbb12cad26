// Runs the benchmark's code without a GPU.
#include <cmath>
#include <memory>

#include "base/testing/fake_device.h"
#include "benchmarks/gpu_offload_run.h"
#include "benchmarks/gpu_run.h"
#include "fsdp/options/offload_options.h"
#include "gtest/gtest.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;

TEST(GpuOffloadTest, TrainsAsTheResidentModelDoes) {
  FakeDevice::Register();
  Place place;
  place.device = FakeDevice::device();
  for (const StepOn step_on :
       {StepOn::kDevice, StepOn::kHost, StepOn::kFaster}) {
    OffloadCase what;
    what.units = 3;
    what.dim = 7;
    what.rows = 5;
    what.step_on = step_on;
    const std::unique_ptr<TurnRun> run = MakeOffloadRun(what, place);
    for (int i = 0; i < 3; ++i) EXPECT_GT(run->Turn(), 0);
    const Figures figures = run->GetFigures();
    for (const char* name : {"ms", "resident_ms", "optimizer_ms", "of_resident",
                             "optimizer_of_resident"}) {
      EXPECT_GT(figures.at(name), 0) << name;
      EXPECT_TRUE(std::isfinite(figures.at(name))) << name;
    }
    // It is not known what kFaster moves.
    EXPECT_EQ(figures.count("GB/s"), step_on == StepOn::kFaster ? 0 : 1);
    EXPECT_LE(figures.at("loss_difference"), 1e-5);
  }
}

}  // namespace
}  // namespace fsdp::benchmarks
