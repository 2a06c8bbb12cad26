// Runs the benchmark's code without a GPU.
#include <cmath>
#include <cstdint>
#include <memory>

#include "base/testing/fake_device.h"
#include "benchmarks/gpu_collectives_run.h"
#include "benchmarks/gpu_run.h"
#include "gtest/gtest.h"

namespace fsdp::benchmarks {
namespace {

using ::fsdp::testing::FakeDevice;

void ExpectFigures(DeviceCollective collective, int64_t bytes,
                   const Place& place) {
  const std::unique_ptr<TurnRun> run =
      MakeCollectiveRun(collective, bytes, place.device, LoopbackGroup(place));
  for (int i = 0; i < 2; ++i) EXPECT_GT(run->Turn(), 0);
  const Figures figures = run->GetFigures();
  for (const char* name : {"GB/s", "of_copy"}) {
    EXPECT_GT(figures.at(name), 0) << name;
    EXPECT_TRUE(std::isfinite(figures.at(name))) << name;
  }
}

TEST(GpuCollectivesTest, FindsBandwidthAmongPlayedRanks) {
  for (const int ranks : {1, 2, 3, 5}) {
    Place place;
    place.ranks = ranks;
    for (const DeviceCollective collective :
         {DeviceCollective::kAllGather, DeviceCollective::kReduceScatter}) {
      ExpectFigures(collective, int64_t{4} * 1021 * ranks, place);
    }
  }
}

TEST(GpuCollectivesTest, RunsOnADeviceWithStreams) {
  FakeDevice::Register();
  Place place;
  place.device = FakeDevice::device();
  place.ranks = 3;
  for (const DeviceCollective collective :
       {DeviceCollective::kAllGather, DeviceCollective::kReduceScatter}) {
    ExpectFigures(collective, int64_t{4} * 1021 * 3, place);
  }
}

}  // namespace
}  // namespace fsdp::benchmarks
