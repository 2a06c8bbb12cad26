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

// What an error begins with, after the rank: other numbers than plain LibTorch
// has; a program that FullyShard() does not take.
inline constexpr absl::string_view kDiffers = "differs: ";
inline constexpr absl::string_view kRefused = "refused: ";

// This rank's part; all ranks of `world` call it with the same arguments.
// `directory`: for files of tiers, empty, of this program alone.
absl::Status RunShardedProgram(const Program& program,
                               const ProgramRecord& record,
                               comm::Communicator& world,
                               const std::string& directory);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_SHARDED_PROGRAM_H_
