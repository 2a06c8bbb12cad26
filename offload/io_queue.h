// Reads and writes of one file, many in flight.
#ifndef OFFLOAD_IO_QUEUE_H_
#define OFFLOAD_IO_QUEUE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
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
// with "`what`, at OFFSET of `path`: ". ResourceExhausted: no space, or a limit
// (ulimit -f); DataLoss: the file ends early; Unavailable: anything else.
absl::Status CheckMoved(const IoRequest& request, absl::string_view what,
                        absl::string_view path);

// Returns ResourceExhausted or Unavailable with "`what`: " and the text of
// `error`.
absl::Status ErrnoStatus(int error, absl::string_view what);

}  // namespace fsdp::offload

#endif  // OFFLOAD_IO_QUEUE_H_
