// One process as one rank of many.
#ifndef COMM_TESTING_LOOPBACK_COMMUNICATOR_H_
#define COMM_TESTING_LOOPBACK_COMMUNICATOR_H_

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct LoopbackPlace {
  int rank = 0;
  int world_size = 1;
};

struct LoopbackOptions {
  LoopbackPlace place;
  // Where tensors are, unless they are on the CPU.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  absl::Duration timeout = absl::Minutes(5);  // Communicator::default_timeout
  // Communicator::PrefersScaledInputs: as NCCL, which it may stand for.
  bool prefers_scaled_inputs = false;
  // This rank's place in the group that Split(color, key) gives: the place in
  // this one where empty, since the peers pass the same color and key.
  std::function<LoopbackPlace(int color, int key)> split;
};

// A rank whose peers all passed what this rank passed: an all-gather writes
// `in` to every slot, a sum is world_size times this rank's. For schedules,
// memory, host cost and the bandwidth of copies of many ranks on one device:
// outputs are written as by a real collective, of the inputs only this rank's
// are read.
//
// Operations run one after the other on a stream of their own, after what the
// stream that is current at the call has done so far; the host waits in Wait()
// only, by polling. On the CPU they are done when the call returns.
absl::StatusOr<std::unique_ptr<Communicator>> CreateLoopback(
    const LoopbackOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LOOPBACK_COMMUNICATOR_H_
