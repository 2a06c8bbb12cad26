// Collectives on a device's tensors by way of host memory.
#ifndef COMM_STAGED_STAGED_COMMUNICATOR_H_
#define COMM_STAGED_STAGED_COMMUNICATOR_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// A group for tensors on `device` over one for tensors on the CPU: inputs are
// copied to page-locked host memory, `host` does the collective there, results
// are copied back. For several ranks on one GPU, which NCCL refuses, and for
// machines without NCCL; much slower than that.
//
// A thread does all of it, call after call, behind what the stream that was
// current at a call had been given: a call never waits. Work::Wait() makes the
// host wait until the result is on the device; BlockCurrentStream() until its
// copy has been enqueued, for which the peers must have called, too, and then
// the current stream. So ranks that are threads of one process must not share
// what computes for all of them, such as the thread of autograd's engine.
//
// Sums have the bits of `host`; its errors come with their text. It is `host`
// that names missing ranks, after its default_timeout(): a deadline of
// Work::Wait() before that only tells which call is late. Destroying a
// communicator aborts what it has not done.
//
// InvalidArgument: there is no `host`, or `device` is neither the CPU (for
// tests) nor has an index.
absl::StatusOr<std::unique_ptr<Communicator>> CreateStagedCommunicator(
    std::unique_ptr<Communicator> host, c10::Device device);

}  // namespace fsdp::comm

#endif  // COMM_STAGED_STAGED_COMMUNICATOR_H_
