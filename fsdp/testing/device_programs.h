// Trainings that must give the same values on a device with streams and on the
// CPU.
#ifndef FSDP_TESTING_DEVICE_PROGRAMS_H_
#define FSDP_TESTING_DEVICE_PROGRAMS_H_

#include <c10/core/Device.h>

#include <ostream>

#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

struct DeviceProgram {
  using Model = FullyShardedDataParallel<NetImpl>;

  std::string name;
  std::function<void(Options&)> configure = [](Options&) {};
  // Runs one step; by default one forward and backward.
  std::function<absl::Status(Model&, const std::function<at::Tensor()>& loss)>
      step = [](Model& model, const std::function<at::Tensor()>& loss) {
        return model->Backward(loss());
      };
  bool clips = false;
  bool steps_in_backward = false;
  // The host waits for values between steps: a scope of full parameters checks
  // whether they were written.
  bool looks_at_values = false;
  // It computes or sends in fewer bits: a last bit that differs may round to
  // another number.
  bool is_coarse = false;
};

void PrintTo(const DeviceProgram& program, std::ostream* out);

std::vector<DeviceProgram> DevicePrograms();

// Returns the name of a test with a program and a world size.
std::string NameOfCase(const std::tuple<DeviceProgram, int>& param);

// Returns the one in the middle of `world_size` ranks, all of which this
// process plays.
absl::StatusOr<std::shared_ptr<Communicator>> OneOf(int world_size,
                                                    c10::Device device);

// Where a training runs: on the CPU, if the functions are not set.
struct TrainingDevice {
  // Returns one of `world_size` ranks. If not set, this process plays all
  // ranks, and the training is one in the middle.
  std::function<absl::StatusOr<std::shared_ptr<Communicator>>(int world_size)>
      world;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Brings a module to the device.
  std::function<void(torch::nn::Module&)> move = [](torch::nn::Module&) {};
  // Called after the first step, which allocates, and after the last one.
  std::function<void()> begin = [] {};
  std::function<void()> end = [] {};
};

// Tensors on the CPU by name.
using Values = std::map<std::string, at::Tensor>;

// Returns the shards of one rank of `world_size` after some steps. Returns
// Internal if a step but the first allocated a buffer of collectives.
absl::StatusOr<Values> TrainOnDevice(const DeviceProgram& program,
                                     int world_size,
                                     const TrainingDevice& place);

// Runs some steps with everything resting in the host's memory and stepped
// there, and the same gradients with AdamW on the CPU. Returns the names of
// parameters that differ in any bit: nothing is summed, so no bit depends on a
// place.
absl::StatusOr<std::vector<std::string>> DifferencesFromStepsOnTheCpu(
    const TrainingDevice& place);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_DEVICE_PROGRAMS_H_
