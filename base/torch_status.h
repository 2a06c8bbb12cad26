// The seam between LibTorch, which throws, and this library, which returns
// absl::Status. No other file of the library turns what is thrown into one.
#ifndef BASE_TORCH_STATUS_H_
#define BASE_TORCH_STATUS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// In the text of errors that this library has LibTorch raise on misuse.
inline constexpr absl::string_view kMisuseMark = " [libtorch_fsdp]";

// Runs `fn` and turns what it throws into a Status whose message begins with
// `what` ("all-gather of blocks.3"). Codes:
//   StatusError                                -> the Status it carries
//   out of memory, no thread can be started    -> ResourceExhausted
//   c10::NotImplementedError                   -> Unimplemented
//   c10::IndexError                            -> OutOfRange
//   c10::ValueError, c10::TypeError            -> InvalidArgument
//   c10d::TimeoutError                         -> DeadlineExceeded
//   c10d::DistNetworkError, DistStoreError,
//   c10d::DistBackendError                     -> Unavailable
//   what has kMisuseMark in its text           -> FailedPrecondition
//   any other c10::Error (a bug of ours, since arguments are checked before
//   torch is called), c10::AcceleratorError    -> Internal
//   any other std::exception                   -> Unknown
// The text of a c10::Error comes without its C++ backtrace. A StatusError keeps
// its message unchanged. Thread-safe.
absl::Status TorchToStatus(absl::string_view what,
                           absl::FunctionRef<void()> fn);
// Asks for the text only when `fn` throws.
absl::Status TorchToStatus(absl::FunctionRef<std::string()> what,
                           absl::FunctionRef<void()> fn);

// `status` with "`what`: " in front of its message; code and payloads stay.
absl::Status Annotate(const absl::Status& status, absl::string_view what);

}  // namespace fsdp

#endif  // BASE_TORCH_STATUS_H_
