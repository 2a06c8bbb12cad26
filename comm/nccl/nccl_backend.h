// NCCL as the device's backend of Connect():
//
//   fsdp::comm::ConnectOptions options;
//   options.device = fsdp::comm::NcclBackend();
#ifndef COMM_NCCL_NCCL_BACKEND_H_
#define COMM_NCCL_NCCL_BACKEND_H_

#include "comm/device_backend.h"
#include "comm/nccl/nccl_communicator.h"

namespace fsdp::comm {

// Rank r of a host takes GPU r modulo their number where `options` names none;
// it becomes the current one of the thread that connects, for LibTorch goes
// back to the current one and would set it up. The timeout is ConnectOptions'.
ConnectDevice NcclBackend(const NcclOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_BACKEND_H_
