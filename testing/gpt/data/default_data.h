// The text that is there without being asked for.
#ifndef TESTING_GPT_DATA_DEFAULT_DATA_H_
#define TESTING_GPT_DATA_DEFAULT_DATA_H_

#include <string>

#include "absl/status/statusor.h"

namespace gpt {

// Returns the folder of LibTorch's C++ headers among the runfiles of the
// program `argv0`, or NotFound if the program was copied away from them.
absl::StatusOr<std::string> DefaultDataPath(const std::string& argv0);

}  // namespace gpt

#endif  // TESTING_GPT_DATA_DEFAULT_DATA_H_
