// Runs one rank, from its data to the report.
#ifndef TESTING_GPT_RANK_PROGRAM_H_
#define TESTING_GPT_RANK_PROGRAM_H_

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "comm/testing/recording_communicator.h"
#include "testing/gpt/options.h"
#include "testing/gpt/trainer.h"

namespace gpt {

struct RankContext {
  std::shared_ptr<fsdp::comm::Communicator> communicator;
  // `communicator` records into it.
  const fsdp::comm::CollectiveLog* log = nullptr;
  // The model's device; `communicator` takes tensors there and on the CPU.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int ranks_on_host = 1;
  std::function<int()> signal;
  // The same job has run before, until a rank failed.
  bool is_restarted = false;
  // Set in a replica, and only `number` and `join` of it.
  ReplicaHooks replica;
};

// Trains, and reports on rank 0's standard output. Collective. Returns
// Cancelled when the ranks were asked to stop. On an error the communicator is
// aborted, so that no rank waits for this one.
absl::Status RunRank(const TrainOptions& options, const RankContext& context);

}  // namespace gpt

#endif  // TESTING_GPT_RANK_PROGRAM_H_
