// What c10d backends throw, as absl::Status.
#ifndef COMM_GROUP_C10D_STATUS_H_
#define COMM_GROUP_C10D_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/torch_status.h"

namespace fsdp::comm {

// Unavailable, with the text of `status` without what only c10d's authors can
// use: the place in their sources and the stack.
absl::Status ConnectionError(const absl::Status& status);

// As TorchToStatus(), for calls of a c10d backend, which takes arguments that
// have been checked:
//   an operation that the backend lacks, by c10d's text  -> Unimplemented
//   what is no c10::Error, as of Gloo's connections      -> Unavailable
absl::Status C10dToStatus(absl::string_view what, FallibleRef fn);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_C10D_STATUS_H_
