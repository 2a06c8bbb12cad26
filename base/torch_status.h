// Converts what LibTorch throws to what this library returns, an absl::Status.
// No other file of the library does so.
#ifndef BASE_TORCH_STATUS_H_
#define BASE_TORCH_STATUS_H_

#include <string>
#include <type_traits>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// Marks the text of errors that this library makes LibTorch raise on misuse.
inline constexpr absl::string_view kMisuseMark = " [libtorch_fsdp]";

// An absl::FunctionRef to a function that returns nothing or an absl::Status.
// Other functions do not convert, because their result would be lost.
class FallibleRef {
 public:
  template <typename Fn, typename Result = std::invoke_result_t<const Fn&>,
            std::enable_if_t<std::is_void_v<Result> ||
                                 std::is_same_v<Result, absl::Status>,
                             int> = 0>
  FallibleRef(const Fn& fn)  // NOLINT(google-explicit-constructor)
      : fn_(absl::FunctionRef<Result()>(fn)) {}
  template <typename Fn, typename Result = std::invoke_result_t<const Fn&>,
            std::enable_if_t<!std::is_void_v<Result> &&
                                 !std::is_same_v<Result, absl::Status>,
                             int> = 0,
            typename = void>
  FallibleRef(const Fn& returns_neither_void_nor_status) = delete;

  // Returns what the function returns, or OK if it returns nothing.
  absl::Status operator()() const;

 private:
  std::variant<absl::FunctionRef<void()>, absl::FunctionRef<absl::Status()>>
      fn_;
};

// Returns what `fn` returns. If `fn` throws, returns a Status whose message
// begins with `what` ("all-gather of blocks.3"). Codes:
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
absl::Status TorchToStatus(absl::string_view what, FallibleRef fn);
// The same, but makes the text `what` only if `fn` throws.
absl::Status TorchToStatus(absl::FunctionRef<std::string()> what,
                           FallibleRef fn);

}  // namespace fsdp

#endif  // BASE_TORCH_STATUS_H_
