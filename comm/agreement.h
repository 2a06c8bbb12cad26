// Ways for the ranks of a group to come to the same decision.
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

// All of these are collective: every rank calls them in the same order, with
// the same `what`, the label of their collectives. Where the communicator fails
// they return its error.

// OK on all ranks when `mine` is OK on all. Otherwise every rank returns the
// code and message of the lowest rank that failed, "rank 2: " in front. Long
// messages are cut. A rank that failed and cannot tell the others returns
// `mine`. IsAgreed() knows such an error.
absl::Status Agree(Communicator& communicator, const absl::Status& mine,
                   absl::string_view what, absl::Time deadline);

// All ranks of a group have returned this error alike. Not collective.
bool IsAgreed(const absl::Status& status);
// `error`, which all ranks return alike, as one that IsAgreed().
absl::Status AsAgreed(absl::Status error);

// OK when all ranks pass the same `text`. Otherwise InvalidArgument on every
// rank: "`what` differ", the ranks that differ from rank 0, and the first line
// in which the lowest of them does.
absl::Status CheckSame(Communicator& communicator, const std::string& text,
                       absl::string_view what, absl::Time deadline);

// Returns when all ranks have called it.
absl::Status Barrier(Communicator& communicator, absl::string_view what,
                     absl::Time deadline);

// Copies rank `root`'s `tensor` to all ranks.
absl::Status BroadcastTensor(Communicator& communicator,
                             const at::Tensor& tensor, int root,
                             absl::string_view what, absl::Time deadline);

// Rank `root`'s text on all ranks.
absl::StatusOr<std::string> BroadcastString(Communicator& communicator,
                                            const std::string& text, int root,
                                            absl::string_view what,
                                            absl::Time deadline);

// Every rank's text on all ranks, by rank. Each takes as much memory as the
// longest.
absl::StatusOr<std::vector<std::string>> GatherStrings(
    Communicator& communicator, absl::string_view mine, absl::string_view what,
    absl::Time deadline);

// Numbers of all ranks as one: a loss to print, a time, a count.

// Collective; the same on all ranks, computed in the order of the ranks. A
// value that is not a number makes the result one. Blocks up to the
// communicator's default_timeout(); errors as Work::Wait().
absl::StatusOr<double> Mean(Communicator& communicator, double value);
absl::StatusOr<double> Sum(Communicator& communicator, double value);
absl::StatusOr<double> Max(Communicator& communicator, double value);

}  // namespace fsdp::comm

#endif  // COMM_AGREEMENT_H_
