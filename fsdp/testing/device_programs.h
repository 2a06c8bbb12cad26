// Trainings that a device with streams and the CPU shall end with the same
// values.
#ifndef FSDP_TESTING_DEVICE_PROGRAMS_H_
#define FSDP_TESTING_DEVICE_PROGRAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::testing {

struct DeviceProgram {
  using Model = FullyShardedDataParallel<NetImpl>;

  std::string name;
  std::function<void(Options&)> configure = [](Options&) {};
  // Of one step, instead of one forward and backward.
  std::function<absl::Status(Model&, const std::function<at::Tensor()>& loss)>
      step = [](Model& model, const std::function<at::Tensor()>& loss) {
        return model->Backward(loss());
      };
  bool clips = false;
  bool steps_in_backward = false;
  // The host waits for values between steps: a scope of full parameters looks
  // at whether they were written.
  bool looks_at_values = false;
  // It computes, or sends, in fewer bits: the last bit of one side may be a
  // step of that on the other.
  bool is_coarse = false;
};

void PrintTo(const DeviceProgram& program, std::ostream* out);

std::vector<DeviceProgram> DevicePrograms();

// That of a test of a program and a world size.
std::string NameOfCase(const std::tuple<DeviceProgram, int>& param);

// Where a training runs. On the CPU without the functions.
struct TrainingDevice {
  // One of `world_size` ranks; without it, one in the middle of them, all of
  // which this process plays.
  std::function<absl::StatusOr<std::shared_ptr<comm::Communicator>>(
      int world_size)>
      world;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Brings a module to the device.
  std::function<void(torch::nn::Module&)> move = [](torch::nn::Module&) {};
  // After the first step, which allocates, and after the last one.
  std::function<void()> begin = [] {};
  std::function<void()> end = [] {};
};

// By name, on the CPU.
using Values = std::map<std::string, at::Tensor>;

// The shards of one rank of `world_size` after some steps. Internal where a
// buffer of collectives was allocated in a step that was not the first.
absl::StatusOr<Values> TrainOnDevice(const DeviceProgram& program,
                                     int world_size,
                                     const TrainingDevice& place);

// Some steps with everything in the host's memory and stepped there, against
// the same gradients that AdamW steps on the CPU: the names of parameters that
// differ in any bit. Nothing here is summed, so that no bit depends on where
// anything lies.
absl::StatusOr<std::vector<std::string>> DifferencesFromStepsOnTheCpu(
    const TrainingDevice& place);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_DEVICE_PROGRAMS_H_
