// Tells a communicator that an exception destroys it.
#ifndef COMM_UNWINDING_H_
#define COMM_UNWINDING_H_

#include <exception>

#include "absl/status/status.h"

namespace fsdp::comm {

// A communicator has one as a member and asks it in its destructor. A rank that
// an exception ends has not left its group: it has failed, and causes the
// errors of its peers.
class Unwinding {
 public:
  // True while an exception unwinds that is younger than this object.
  explicit operator bool() const {
    return std::uncaught_exceptions() > exceptions_before_;
  }

 private:
  const int exceptions_before_ = std::uncaught_exceptions();
};

// The reason with which such a communicator is aborted.
inline absl::Status EndedByException() {
  return absl::UnknownError(
      "an exception, which its own output tells of, has ended it");
}

}  // namespace fsdp::comm

#endif  // COMM_UNWINDING_H_
