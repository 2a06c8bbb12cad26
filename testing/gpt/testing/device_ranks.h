// A test program whose ranks are processes that share a device.
#ifndef TESTING_GPT_TESTING_DEVICE_RANKS_H_
#define TESTING_GPT_TESTING_DEVICE_RANKS_H_

#include <c10/core/DeviceType.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace gpt::testing {

struct SharedDevice {
  c10::DeviceType type = c10::DeviceType::CPU;
  // Moves a module to the device.
  std::function<void(torch::nn::Module& module)> move;
  // Are called after two of the steps and after the last one.
  std::function<void()> begin = [] {};
  std::function<absl::Status()> end = [] { return absl::OkStatus(); };
  // For losses, relative to those of training without this library on the CPU.
  double tolerance = 0;
};

// Starts this program once more for each rank, which then trains while
// `offload` ("none", "cpu" or "ssd") rests elsewhere, and compares its losses.
// Errors are on standard error.
absl::Status TrainInProcesses(int ranks, const std::string& offload);

// Is the program's main function: of the test, or of a rank.
int TestOrRank(int argc, char** argv, const SharedDevice& device);

}  // namespace gpt::testing

#endif  // TESTING_GPT_TESTING_DEVICE_RANKS_H_
