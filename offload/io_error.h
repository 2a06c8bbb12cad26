// What is said about a request that did not move what it should have.
#ifndef OFFLOAD_IO_ERROR_H_
#define OFFLOAD_IO_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "offload/io_queue.h"

namespace fsdp::offload {

// OK if `request` has moved all its bytes. Otherwise, after "`what`, at OFFSET
// of `path`: ", ResourceExhausted for no space or a limit (ulimit -f), DataLoss
// for a file that ends early, Unavailable for all else.
absl::Status CheckMoved(const IoRequest& request, absl::string_view what,
                        absl::string_view path);

// ResourceExhausted or Unavailable: "`what`: " and the text of `error`.
absl::Status ErrnoStatus(int error, absl::string_view what);

}  // namespace fsdp::offload

#endif  // OFFLOAD_IO_ERROR_H_
