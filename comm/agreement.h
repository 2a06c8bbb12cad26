// Lets the ranks of a group come to the same decision.
#ifndef COMM_AGREEMENT_H_
#define COMM_AGREEMENT_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// All of these except IsAgreed() and AsAgreed() are collective: every rank
// calls them in the same order, with the same `what`, the label of their
// collectives. If the communicator fails they return its error.

// Returns OK if `mine` is OK on all ranks. Otherwise every rank returns the
// code and the message of the lowest rank that failed, after "rank 2: ", as an
// error that IsAgreed(). Messages are cut after 4096 bytes. A rank that failed
// but cannot tell the others returns `mine`.
absl::Status Agree(Communicator& communicator, const absl::Status& mine,
                   absl::string_view what, absl::Time deadline);

// True if all ranks of a group have returned this same error.
bool IsAgreed(const absl::Status& status);
// Marks `error`, which all ranks return alike, so that it IsAgreed().
absl::Status AsAgreed(absl::Status error);

// Returns OK if all ranks pass the same `text`. Otherwise every rank returns
// InvalidArgument: "`what` differ", the ranks that differ from rank 0, and the
// first line in which the lowest of them does. It IsAgreed().
absl::Status CheckSame(Communicator& communicator, const std::string& text,
                       absl::string_view what, absl::Time deadline);

// Returns when all ranks have called it.
absl::Status Barrier(Communicator& communicator, absl::string_view what,
                     absl::Time deadline);

// Copies rank `root`'s `tensor` to all ranks.
absl::Status BroadcastTensor(Communicator& communicator,
                             const at::Tensor& tensor, int root,
                             absl::string_view what, absl::Time deadline);

// Returns rank `root`'s text, of 1 GiB at most, on all ranks.
absl::StatusOr<std::string> BroadcastString(Communicator& communicator,
                                            const std::string& text, int root,
                                            absl::string_view what,
                                            absl::Time deadline);

// Returns the texts of all ranks, by rank, on all ranks. Each takes as much
// memory as the longest, which has 1 GiB at most.
absl::StatusOr<std::vector<std::string>> GatherStrings(
    Communicator& communicator, absl::string_view mine, absl::string_view what,
    absl::Time deadline);

// These make one number of all ranks' numbers, such as a loss to print, a time
// or a count. All ranks return the same bits, computed in the order of the
// ranks; a NaN gives a NaN. They block up to the communicator's
// default_timeout() and return the errors of Work::Wait().
absl::StatusOr<double> Mean(Communicator& communicator, double value);
absl::StatusOr<double> Sum(Communicator& communicator, double value);
absl::StatusOr<double> Max(Communicator& communicator, double value);

}  // namespace fsdp::comm

#endif  // COMM_AGREEMENT_H_
