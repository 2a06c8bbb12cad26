// Starts threads of the library.
#ifndef BASE_START_THREAD_H_
#define BASE_START_THREAD_H_

#include <string>
#include <thread>
#include <type_traits>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// Runs `body` on a new thread. ResourceExhausted: the system starts none, and
// `body` is dropped; the error tells the `purpose` ("to connect") and the
// limits.
absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        absl::AnyInvocable<void() &&> body);
// Is deleted because the result of `body` would be lost.
template <typename Fn,
          std::enable_if_t<!std::is_void_v<std::invoke_result_t<Fn>>, int> = 0>
absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        Fn body) = delete;

// Tells how many threads this process may have, for the text of an error: "this
// user may have 128 processes and threads (ulimit -u), ...".
std::string ThreadLimits();

}  // namespace fsdp

#endif  // BASE_START_THREAD_H_
