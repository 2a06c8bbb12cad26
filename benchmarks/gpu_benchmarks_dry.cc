// Runs the benchmarks for a GPU on the fake device, for dry runs of
// tools/gpu_suite: their figures mean nothing.
#include "base/testing/fake_device.h"
#include "benchmarks/gpu_benchmarks.h"

int main(int argc, char** argv) {
  fsdp::testing::FakeDevice::Register();
  return fsdp::benchmarks::RunGpuBenchmarks(
      argc, argv, fsdp::testing::FakeDeviceGraph::Make);
}
