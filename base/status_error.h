// The library's one exception type: an absl::Status for code that cannot return
// one, such as a module's forward or an autograd node.
#ifndef BASE_STATUS_ERROR_H_
#define BASE_STATUS_ERROR_H_

#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

class StatusError : public std::runtime_error {
 public:
  explicit StatusError(absl::Status status)
      : std::runtime_error(std::string(status.message())),
        status_(std::move(status)) {}

  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// Throws StatusError when `status` is not OK.
inline void ThrowIfError(absl::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

// Returns the value of `result`; throws StatusError if there is none.
template <typename T>
T ValueOrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw StatusError(std::move(result).status());
  return *std::move(result);
}

}  // namespace fsdp

#endif  // BASE_STATUS_ERROR_H_
