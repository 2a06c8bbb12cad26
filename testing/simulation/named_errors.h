// Judges whether the errors of ranks say what has gone wrong.
#ifndef TESTING_SIMULATION_NAMED_ERRORS_H_
#define TESTING_SIMULATION_NAMED_ERRORS_H_

#include <vector>

#include "absl/status/status.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

// Returns whether the error tells of this fault: of the cause that it leads to,
// or of its rank if that is lost to the others.
bool IsNamedBy(const Fault& fault, const absl::Status& error);

// Returns the ranks whose errors, at their places in `ends`, tell neither of
// one of these faults nor of a rank that is lost because of them.
std::vector<int> RanksThatSayNothing(const std::vector<Fault>& faults,
                                     const std::vector<absl::Status>& ends);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_NAMED_ERRORS_H_
