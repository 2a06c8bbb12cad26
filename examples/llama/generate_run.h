// The work of the program //examples/llama:generate.
#ifndef EXAMPLES_LLAMA_GENERATE_RUN_H_
#define EXAMPLES_LLAMA_GENERATE_RUN_H_

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <istream>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "base/device_graph.h"
#include "examples/llama/generation/generator.h"

namespace llama {

// The command line says these.
struct GenerateFlags {
  std::string model;
  std::string adapter;  // empty: none
  // One of these two is set.
  std::string prompt;
  std::string tokens;  // "-": from standard input
  bool batch = false;  // each line of it is a prompt

  int64_t max_tokens = 256;
  SamplingOptions sampling;
  // Parameters and compute have this dtype; unset: one that is fast.
  std::optional<c10::ScalarType> precision = c10::kFloat;
  bool is_int8 = false;  // the base's linear layers
  c10::DeviceType device = c10::DeviceType::CPU;
  int threads = 0;  // 0: as many as LibTorch chooses
};

// Reads the model, continues the prompts of `flags` or `in`, writes the tokens
// to `out`, those of a single prompt as they come, and everything else to
// `log`. `make_graph`: see Generate(). InvalidArgument: the model's tokens are
// no bytes. Other errors are those of ReadConfig(), LoadWholeModel() and
// Generate(), and DataLoss if `out` cannot be written.
absl::Status RunGenerate(const GenerateFlags& flags, std::istream& in,
                         std::ostream& out, std::ostream& log,
                         const fsdp::DeviceGraphMaker& make_graph = nullptr);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATE_RUN_H_
