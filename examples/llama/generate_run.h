// The work of the program //examples/llama:generate.
#ifndef EXAMPLES_LLAMA_GENERATE_RUN_H_
#define EXAMPLES_LLAMA_GENERATE_RUN_H_

#include <istream>
#include <ostream>

#include "absl/status/status.h"
#include "examples/llama/flags/generate_flags.h"

namespace llama {

// Reads the model, continues the prompt of `flags` or `in`, writes the tokens
// to `out` as they come, and everything else to `log`. InvalidArgument: the
// model's tokens are no bytes. Other errors are those of ReadConfig(),
// LoadWholeModel() and Generate(), and DataLoss if `out` cannot be written.
absl::Status RunGenerate(const GenerateFlags& flags, std::istream& in,
                         std::ostream& out, std::ostream& log);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATE_RUN_H_
