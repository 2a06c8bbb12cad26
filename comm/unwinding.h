// Communicators that an exception destroys.
#ifndef COMM_UNWINDING_H_
#define COMM_UNWINDING_H_

#include <exception>

#include "absl/status/status.h"

namespace fsdp::comm {

// A member of a communicator, whose destructor asks it: a rank that an
// exception ends has not left its group, it has failed, and is the cause of
// what its peers meet with.
class Unwinding {
 public:
  // Whether an exception that is younger than this object is on its way.
  explicit operator bool() const {
    return std::uncaught_exceptions() > exceptions_before_;
  }

 private:
  const int exceptions_before_ = std::uncaught_exceptions();
};

// What such a communicator is aborted with.
inline absl::Status EndedByException() {
  return absl::UnknownError(
      "an exception, which its own output tells of, has ended it");
}

}  // namespace fsdp::comm

#endif  // COMM_UNWINDING_H_
