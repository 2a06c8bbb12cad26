// The trained model for others.
#ifndef EXAMPLES_LLAMA_TRAINING_EXPORT_H_
#define EXAMPLES_LLAMA_TRAINING_EXPORT_H_

#include <c10/core/ScalarType.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/training/model.h"

namespace llama {

// The files beside the weights in the folder `base` that others need to use the
// model, by name: the tokenizer's, above all. Those that there are.
std::map<std::string, std::string> TextsBeside(const std::string& base);

// A new folder: the model in `dtype`, with config.json and TextsBeside(base).
// Adapters are merged into the model, which has them merged from then on.
// Collective.
absl::Status ExportTrained(const std::string& folder, const std::string& base,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters);

// `config` with `dtype` as that of the weights, by the name that it has there:
// "torch_dtype" or "dtype". InvalidArgument: no JSON object.
absl::StatusOr<std::string> WithDtype(const std::string& config,
                                      c10::ScalarType dtype);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_EXPORT_H_
