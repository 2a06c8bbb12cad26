// Collectives on a device's tensors through host memory.
#ifndef COMM_TESTING_STAGED_STAGED_COMMUNICATOR_H_
#define COMM_TESTING_STAGED_STAGED_COMMUNICATOR_H_

#include <c10/core/Device.h>

#include <memory>

#include "comm/communicator.h"

namespace fsdp::comm {

// Returns a group for tensors on `device`, which has an index, over `host`, a
// group for CPU tensors: inputs are copied to page-locked host memory, `host`
// does the collective, and results are copied back. It is for tests of several
// ranks on one GPU, which NCCL refuses, and on devices that have no NCCL.
//
// A call polls until its input is on the host. Work::Wait(),
// BlockCurrentStream() and the destructor of a Work make the host wait for the
// peers, then enqueue the copy of the result. So ranks that are threads of one
// process may not share a thread that computes for all of them, such as that of
// autograd's engine. Sums have the bits of `host`, and errors its text.
std::unique_ptr<Communicator> CreateStagedCommunicator(
    std::unique_ptr<Communicator> host, c10::Device device);

// Returns the backend that makes a staged group, over a new group that it
// splits from the host's, for ConnectOptions::device. If `device` has no index,
// rank r of a host takes device r modulo their number, so that several ranks
// may share one.
ConnectDevice StagedBackend(c10::Device device);

}  // namespace fsdp::comm

#endif  // COMM_TESTING_STAGED_STAGED_COMMUNICATOR_H_
