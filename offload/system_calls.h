// The calls of the operating system that a file store makes; tests replace
// them.
#ifndef OFFLOAD_SYSTEM_CALLS_H_
#define OFFLOAD_SYSTEM_CALLS_H_

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "offload/io_queue.h"

namespace fsdp::offload {

// The ways to have many reads and writes in flight.
enum class QueueKind { kIoUring, kThreads };

// Thread-safe. Functions that return an int, except Open(), return 0 or an
// errno.
class SystemCalls {
 public:
  virtual ~SystemCalls() = default;

  // Returns a descriptor, or -errno.
  virtual int Open(const std::string& path, int flags);
  virtual int Stat(int descriptor, struct stat* found);
  // Returns how many bytes a user without privileges can still have there.
  virtual int64_t FreeBytes(int descriptor);
  // Makes the file `bytes` long, with space for all of them.
  virtual int Allocate(int descriptor, int64_t bytes);
  // Makes later reads and writes bypass the page cache (O_DIRECT). EINVAL: the
  // file system cannot, and nothing has changed.
  virtual int BypassCache(int descriptor);
  virtual absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(QueueKind kind,
                                                             int descriptor,
                                                             int depth);

  static SystemCalls& Real();
};

// Reads and writes the file behind `descriptor`, which must outlive the queue,
// by pread(2) and pwrite(2) in one thread for each request in flight, or in as
// many as can be started. ResourceExhausted: none can.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(int descriptor,
                                                         int depth);

// Reads and writes the file behind `descriptor`, which must outlive the queue,
// by io_uring(7). Unavailable: the kernel refuses, because it is older than
// 5.6, or a container or an administrator forbids io_uring.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(int descriptor,
                                                        int depth);

}  // namespace fsdp::offload

#endif  // OFFLOAD_SYSTEM_CALLS_H_
