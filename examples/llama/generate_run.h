// The work of the program //examples/llama:generate.
#ifndef EXAMPLES_LLAMA_GENERATE_RUN_H_
#define EXAMPLES_LLAMA_GENERATE_RUN_H_

#include <istream>
#include <ostream>

#include "absl/status/status.h"
#include "base/device_graph.h"
#include "examples/llama/flags/generate_flags.h"

namespace llama {

// Reads the model, continues the prompts of `flags` or `in`, writes the tokens
// to `out`, those of a single prompt as they come, and everything else to
// `log`. `make_graph`: see Generate(). InvalidArgument: the model's tokens are
// no bytes. Other errors are those of ReadConfig(), LoadWholeModel() and
// Generate(), and DataLoss if `out` cannot be written.
absl::Status RunGenerate(const GenerateFlags& flags, std::istream& in,
                         std::ostream& out, std::ostream& log,
                         const fsdp::DeviceGraphMaker& make_graph = nullptr);

// Runs the program and returns its exit code. `make_graph` is null in a program
// without CUDA.
int GenerateProgram(int argc, char** argv,
                    const fsdp::DeviceGraphMaker& make_graph = nullptr);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATE_RUN_H_
