// How a group comes by its backend for a device's tensors.
#ifndef COMM_DEVICE_BACKEND_H_
#define COMM_DEVICE_BACKEND_H_

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Where the ranks of a device's backend meet.
struct DeviceMeeting {
  c10::intrusive_ptr<c10d::Store> store;  // of this backend alone
  int local_rank = 0;                     // among the ranks of this host
  absl::Duration timeout;  // Communicator::default_timeout() of the backend
  Communicator& host;      // of the same ranks, to be split
};

// Connects one rank, in the thread of the caller. Blocks until all have come.
using ConnectDevice =
    std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
        const DeviceMeeting& meeting)>;

}  // namespace fsdp::comm

#endif  // COMM_DEVICE_BACKEND_H_
