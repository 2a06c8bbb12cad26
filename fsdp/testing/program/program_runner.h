// Runs programs sharded and plain, in this process.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"

namespace fsdp::testing {

// Runs ranks as threads, in the program's own group. `scratch` must be an
// existing directory.
ProgramOutcome RunProgram(const Program& program, const std::string& scratch);

// Runs `programs` in turn as one of several processes that share memory; the
// environment says which rank (comm/startup/environment.h). They share one
// group until one fails; refused ones are passed over. The file `report` says
// where this rank is, in case it dies.
BatchEnd RunBatchAsRank(const std::vector<Program>& programs,
                        const std::string& scratch, const std::string& report);

// Write and read such a report.
absl::Status WriteBatchEnd(const std::string& path, const BatchEnd& end);
absl::StatusOr<BatchEnd> ReadBatchEnd(const std::string& path);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
