// Reads and writes by io_uring(7).
#ifndef OFFLOAD_URING_QUEUE_H_
#define OFFLOAD_URING_QUEUE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "offload/io_queue.h"

namespace fsdp::offload {

// Of the file behind `descriptor`, which has to outlive the queue. Unavailable
// where the kernel refuses: it is older than 5.6, or a container or an
// administrator forbids io_uring.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(int descriptor,
                                                        int depth);

}  // namespace fsdp::offload

#endif  // OFFLOAD_URING_QUEUE_H_
