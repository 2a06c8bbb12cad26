// What a file store asks of the operating system; tests answer otherwise.
#ifndef OFFLOAD_SYSTEM_CALLS_H_
#define OFFLOAD_SYSTEM_CALLS_H_

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "offload/io_queue.h"

namespace fsdp::offload {

// How to have many reads and writes in flight.
enum class QueueKind { kIoUring, kThreads };

// Thread-safe. Those that return an int return 0 or an errno, but for Open().
class SystemCalls {
 public:
  virtual ~SystemCalls() = default;

  // A descriptor, or -errno.
  virtual int Open(const std::string& path, int flags);
  virtual int Stat(int descriptor, struct stat* found);
  // How many bytes a user without privileges can still have there.
  virtual int64_t FreeBytes(int descriptor);
  // Makes the file `bytes` long, all of them there to be written.
  virtual int Allocate(int descriptor, int64_t bytes);
  // Past the page cache from now on (O_DIRECT). EINVAL where the file system
  // does not do that; then nothing has changed.
  virtual int BypassCache(int descriptor);
  virtual absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(QueueKind kind,
                                                             int descriptor,
                                                             int depth);

  static SystemCalls& Real();
};

// Reads and writes by threads that block in pread(2) and pwrite(2).

// Of the file behind `descriptor`, which has to outlive the queue; one thread
// for each request in flight, or as many as can be started.
// ResourceExhausted: none can.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(int descriptor,
                                                         int depth);

// Reads and writes by io_uring(7).

// Of the file behind `descriptor`, which has to outlive the queue. Unavailable
// where the kernel refuses: it is older than 5.6, or a container or an
// administrator forbids io_uring.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(int descriptor,
                                                        int depth);

}  // namespace fsdp::offload

#endif  // OFFLOAD_SYSTEM_CALLS_H_
