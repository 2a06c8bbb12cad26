// Turns the exceptions of c10d backends into absl::Status.
#ifndef COMM_GROUP_C10D_STATUS_H_
#define COMM_GROUP_C10D_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/torch_status.h"

namespace fsdp::comm {

// Returns Unavailable with the text of `status`, without the place in c10d's
// sources and the stack.
absl::Status ConnectionError(const absl::Status& status);

// Does what TorchToStatus() does, for a call of a c10d backend whose arguments
// have been checked. It also maps
//   a text of c10d that the backend lacks an operation  to Unimplemented
//   what is no c10::Error, as of Gloo's connections     to Unavailable
absl::Status C10dToStatus(absl::string_view what, FallibleRef fn);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_C10D_STATUS_H_
