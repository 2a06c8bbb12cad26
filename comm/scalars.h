// Numbers of all ranks as one: a loss to print, a time, a count.
#ifndef COMM_SCALARS_H_
#define COMM_SCALARS_H_

#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// Collective; the same on all ranks, computed in the order of the ranks. A
// value that is not a number makes the result one. Blocks up to the
// communicator's default_timeout(); errors as Work::Wait().
absl::StatusOr<double> Mean(Communicator& communicator, double value);
absl::StatusOr<double> Sum(Communicator& communicator, double value);
absl::StatusOr<double> Max(Communicator& communicator, double value);

}  // namespace fsdp::comm

#endif  // COMM_SCALARS_H_
