// A communicator with which one process plays one rank of many.
#ifndef COMM_TESTING_LOOPBACK_COMMUNICATOR_H_
#define COMM_TESTING_LOOPBACK_COMMUNICATOR_H_

#include <c10/core/Device.h>

#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct LoopbackPlace {
  int rank = 0;
  int world_size = 1;
};

struct LoopbackOptions {
  LoopbackPlace place;
  // The device of tensors that are not on the CPU.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  absl::Duration timeout = absl::Minutes(5);  // Communicator::default_timeout
  // Communicator::PrefersScaledInputs(), which is true for NCCL.
  bool prefers_scaled_inputs = false;
};

// Returns a rank whose peers all pass what this rank passes, so that its groups
// split into groups of all: an all-gather writes `in` to every slot, a sum is
// world_size times this rank's input. It measures schedules, memory, host cost
// and the bandwidth of copies of many ranks on one device: outputs are written
// as in a real collective, but only this rank's inputs are read.
//
// Operations run one after the other on a stream of their own, after the work
// of the stream that is current at the call. The host waits only in Wait(), by
// polling. On the CPU they are done when the call returns.
CreatedCommunicator CreateLoopback(const LoopbackOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LOOPBACK_COMMUNICATOR_H_
