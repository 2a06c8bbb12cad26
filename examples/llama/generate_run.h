// What the program //examples/llama:generate does.
#ifndef EXAMPLES_LLAMA_GENERATE_RUN_H_
#define EXAMPLES_LLAMA_GENERATE_RUN_H_

#include <istream>
#include <ostream>

#include "absl/status/status.h"
#include "examples/llama/flags/generate_flags.h"

namespace llama {

// Reads the model, continues what `flags` or `in` say, and writes that to `out`
// as it comes, and to `log` what else there is to tell. InvalidArgument: the
// model's tokens are no bytes. Errors of ReadConfig(), LoadWholeModel() and
// Generate().
absl::Status RunGenerate(const GenerateFlags& flags, std::istream& in,
                         std::ostream& out, std::ostream& log);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATE_RUN_H_
