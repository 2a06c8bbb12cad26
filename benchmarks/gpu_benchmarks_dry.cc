// Runs the benchmarks for a GPU on the fake device, for dry runs of
// tools/gpu_suite: their figures mean nothing.
#include "base/testing/fake_device.h"
#include "benchmarks/gpu_benchmarks.h"

int main(int argc, char** argv) {
  using fsdp::benchmarks::Place;
  fsdp::testing::FakeDevice::Register();
  return fsdp::benchmarks::RunBenchmarks(
      argc, argv, [](const Place& place, int turns) {
        fsdp::benchmarks::AddGpuBenchmarks(
            place, turns, /*nccl=*/nullptr,
            fsdp::testing::FakeDeviceGraph::Make);
      });
}
