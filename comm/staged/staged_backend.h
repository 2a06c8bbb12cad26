// Collectives by way of host memory as the device's backend of Connect():
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::StagedBackend(c10::Device(c10::kCUDA));
#ifndef COMM_STAGED_STAGED_BACKEND_H_
#define COMM_STAGED_STAGED_BACKEND_H_

#include <c10/core/Device.h>

#include "comm/communicator.h"

namespace fsdp::comm {

// A staged group (comm/staged/staged_communicator.h) over one of its own split
// from the host's. Where `device` has no index, rank r of a host takes device r
// modulo their number: several ranks may share one.
ConnectDevice StagedBackend(c10::Device device);

}  // namespace fsdp::comm

#endif  // COMM_STAGED_STAGED_BACKEND_H_
