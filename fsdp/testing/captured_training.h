// One rank's training on the fake device whose steps can be captured.
#ifndef FSDP_TESTING_CAPTURED_TRAINING_H_
#define FSDP_TESTING_CAPTURED_TRAINING_H_

#include <torch/optim/optimizer.h>

#include "fsdp/capture/step_capture.h"
#include "fsdp/testing/device_programs.h"

namespace fsdp::testing {

struct Training {
  static constexpr int64_t kDim = 6;
  static constexpr int kBlocks = 3;

  // The data and the learning rate of step `i`, which differ in every step; the
  // rate is a float.
  static at::Tensor Batch(int i);
  static double RateOf(int i);

  DeviceProgram::Model model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  // This refers to the object: do not move it.
  CapturedStep::Step step;

  void SetRate(int i);
  absl::StatusOr<at::Tensor> RunEagerly(int i);
  // Returns copies of the shards on the CPU.
  std::vector<at::Tensor> Shards() const;
};

// Returns one of `world_size` ranks, all of which this process plays.
absl::StatusOr<std::shared_ptr<Communicator>> FakeDeviceWorld(int world_size);

// FakeDevice must be registered. `world` replaces FakeDeviceWorld() if set.
absl::StatusOr<std::unique_ptr<Training>> StartTraining(
    const DeviceProgram& program, int world_size,
    const std::function<void(Options&)>& configure = [](Options&) {},
    std::shared_ptr<Communicator> world = nullptr);

CaptureOptions CapturedOnTheFakeDevice();

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_CAPTURED_TRAINING_H_
