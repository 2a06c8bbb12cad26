// The calls of the operating system that a file store makes; tests replace
// them.
#ifndef OFFLOAD_SYSTEM_CALLS_H_
#define OFFLOAD_SYSTEM_CALLS_H_

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::offload {

struct IoRequest {
  enum class Kind { kRead, kWrite, kSync };

  Kind kind = Kind::kRead;
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;  // in the file
  // When the request is over: the bytes moved, or -errno.
  int64_t result = 0;
};

// Used by one thread, except Wake(). Requests end in any order. None may be in
// flight when the queue is destroyed.
class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  virtual ~IoQueue() = default;

  // At most depth() requests may be in flight. `request` must live until it is
  // over.
  virtual void Start(IoRequest* request) = 0;

  // Blocks until a request is over, or until Wake() was called since the last
  // Wait(). Sets `over` to the requests that are over.
  virtual void Wait(std::vector<IoRequest*>& over) = 0;

  // Thread-safe.
  virtual void Wake() = 0;

  virtual int depth() const = 0;

  // "io_uring, 8 in flight".
  virtual std::string Describe() const = 0;
};

// Returns OK if `request` has moved all its bytes. The text of an error begins
// with "`what`, at OFFSET of `path`: ". DataLoss: the file ends early;
// Unavailable: it was not all written; FileError() of what the system says.
absl::Status CheckMoved(const IoRequest& request, absl::string_view what,
                        absl::string_view path);

// The ways to have many reads and writes in flight.
enum class QueueKind {
  // io_uring(7). Unavailable: the kernel refuses, because it is older than 5.6,
  // or a container or an administrator forbids io_uring.
  kIoUring,
  // pread(2) and pwrite(2) in one thread for each request in flight, or in as
  // many as can be started. ResourceExhausted: none can.
  kThreads,
};

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
  // The file behind `descriptor` must outlive the queue.
  virtual absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(QueueKind kind,
                                                             int descriptor,
                                                             int depth);

  static SystemCalls& Real();
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_SYSTEM_CALLS_H_
