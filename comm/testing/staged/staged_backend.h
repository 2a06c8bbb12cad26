// For tests: makes collectives through host memory the device's backend of
// Connect():
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::StagedBackend(c10::Device(c10::kCUDA));
#ifndef COMM_TESTING_STAGED_STAGED_BACKEND_H_
#define COMM_TESTING_STAGED_STAGED_BACKEND_H_

#include <c10/core/Device.h>

#include "comm/communicator.h"

namespace fsdp::comm {

// Makes a staged group (comm/testing/staged/staged_communicator.h) over a new
// group that it splits from the host's. If `device` has no index, rank r of a
// host takes device r modulo their number, so that several ranks may share one.
ConnectDevice StagedBackend(c10::Device device);

}  // namespace fsdp::comm

#endif  // COMM_TESTING_STAGED_STAGED_BACKEND_H_
