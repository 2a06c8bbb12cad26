// The program //testing/gpt:train.
#ifndef TESTING_GPT_TRAIN_PROGRAM_H_
#define TESTING_GPT_TRAIN_PROGRAM_H_

#include <functional>
#include <memory>

#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "replicas/replicas.h"

namespace gpt {

// Programs for tests change ranks that are processes by these; each may be
// empty.
struct TrainHooks {
  std::function<void(fsdp::comm::ConnectOptions&)> connecting;
  std::function<std::unique_ptr<fsdp::comm::Communicator>(
      std::unique_ptr<fsdp::comm::Communicator>)>
      connected;
  std::function<void(fsdp::ReplicaOptions&)> joining;
};

// Runs main(), with NCCL if `nccl_on` is not empty, and returns the exit code.
int TrainProgram(int argc, char** argv, const fsdp::comm::NcclOn& nccl_on,
                 const TrainHooks& hooks = {});

}  // namespace gpt

#endif  // TESTING_GPT_TRAIN_PROGRAM_H_
