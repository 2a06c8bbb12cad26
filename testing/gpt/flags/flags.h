// The command line.
#ifndef TESTING_GPT_FLAGS_FLAGS_H_
#define TESTING_GPT_FLAGS_FLAGS_H_

#include "absl/status/statusor.h"
#include "testing/gpt/flags/options.h"

namespace gpt {

// Reads and checks the flags; "--save-init" is accepted for "--save_init".
// Relative paths become those the user meant, also under `bazel run`, which
// changes the working directory. Exits with a message for --help and for flags
// that absl cannot parse. InvalidArgument for all else.
absl::StatusOr<TrainOptions> ParseFlags(int argc, char** argv);

}  // namespace gpt

#endif  // TESTING_GPT_FLAGS_FLAGS_H_
