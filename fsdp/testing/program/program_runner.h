// Runs a program sharded and plain, in this process.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_outcome.h"

namespace fsdp::testing {

// Ranks are threads, in the program's own group. `scratch`: a directory that
// exists.
ProgramOutcome RunProgram(const Program& program, const std::string& scratch);

// The same of `programs` in turn, as one of several processes that share
// memory: the rank that the environment says (comm/startup/environment.h). They
// run in one group until one fails; refused ones are passed over. `report`: the
// file that says where this rank is, for a rank that ends halfway.
BatchEnd RunBatchAsRank(const std::vector<Program>& programs,
                        const std::string& scratch, const std::string& report);

// Such a file.
absl::Status WriteBatchEnd(const std::string& path, const BatchEnd& end);
absl::StatusOr<BatchEnd> ReadBatchEnd(const std::string& path);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
