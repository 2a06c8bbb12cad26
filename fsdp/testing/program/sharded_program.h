// Runs a Program sharded and compares it with what plain LibTorch did.
#ifndef FSDP_TESTING_PROGRAM_SHARDED_PROGRAM_H_
#define FSDP_TESTING_PROGRAM_SHARDED_PROGRAM_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

// Errors begin with these after the rank: numbers differ from plain LibTorch's,
// or FullyShard() refuses the program.
inline constexpr absl::string_view kDiffers = "differs: ";
inline constexpr absl::string_view kRefused = "refused: ";

// Runs this rank's part; all ranks of `world` must call it with the same
// arguments. `directory` must be empty and of this program alone; it takes the
// files of tiers.
absl::Status RunShardedProgram(const Program& program,
                               const ProgramRecord& record,
                               comm::Communicator& world,
                               const std::string& directory);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_SHARDED_PROGRAM_H_
