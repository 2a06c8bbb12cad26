// The text that is there without being asked for.
#ifndef EXAMPLES_GPT_DEFAULT_TEXT_H_
#define EXAMPLES_GPT_DEFAULT_TEXT_H_

#include <string>

#include "absl/status/statusor.h"

namespace gpt {

// Returns the folder of LibTorch's C++ headers, which are among the runfiles of
// the program `argv0`. NotFound: the program was copied away from them.
absl::StatusOr<std::string> DefaultText(const std::string& argv0);

}  // namespace gpt

#endif  // EXAMPLES_GPT_DEFAULT_TEXT_H_
