// Reads and writes by threads that block in pread(2) and pwrite(2).
#ifndef OFFLOAD_THREAD_QUEUE_H_
#define OFFLOAD_THREAD_QUEUE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "offload/io_queue.h"

namespace fsdp::offload {

// Of the file behind `descriptor`, which has to outlive the queue; one thread
// for each request in flight, or as many as can be started.
// ResourceExhausted: none can.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(int descriptor,
                                                         int depth);

}  // namespace fsdp::offload

#endif  // OFFLOAD_THREAD_QUEUE_H_
