// For functions that return a Status: what runs on a rank cannot use
// GoogleTest's assertions.
#ifndef BASE_TESTING_STATUS_CHECK_H_
#define BASE_TESTING_STATUS_CHECK_H_

#include <string>

#include "absl/status/status.h"

namespace fsdp::testing {

// Returns OK if `condition`, otherwise Internal with the text `what`.
inline absl::Status Check(bool condition, const std::string& what) {
  return condition ? absl::OkStatus() : absl::InternalError(what);
}

}  // namespace fsdp::testing

#endif  // BASE_TESTING_STATUS_CHECK_H_
