// The work of the program //examples/llama:train.
#ifndef EXAMPLES_LLAMA_TRAIN_RUN_H_
#define EXAMPLES_LLAMA_TRAIN_RUN_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/status.h"
#include "base/device_graph.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/train_flags.h"

namespace llama {

// Runs one rank's part, on its device. --capture needs `make_graph`.
// Collective.
absl::Status TrainRank(const TrainFlags& flags, c10::Device device,
                       const std::shared_ptr<fsdp::comm::Communicator>& ranks,
                       const fsdp::DeviceGraphMaker& make_graph = nullptr);

// Runs the program and returns its exit code. Both functions are null in a
// program without CUDA.
int TrainProgram(int argc, char** argv,
                 const fsdp::comm::NcclOn& nccl_on = nullptr,
                 const fsdp::DeviceGraphMaker& make_graph = nullptr);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAIN_RUN_H_
