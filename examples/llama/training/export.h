// The trained model for others.
#ifndef EXAMPLES_LLAMA_TRAINING_EXPORT_H_
#define EXAMPLES_LLAMA_TRAINING_EXPORT_H_

#include <c10/core/ScalarType.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/training/model.h"

namespace llama {

// A new folder: the model in `dtype`, with config.json and what else the folder
// `base` has besides weights: the tokenizer, above all. Adapters are merged
// into the model, which has them merged from then on. Collective.
absl::Status ExportTrained(const std::string& folder, const std::string& base,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters);

// `config` with `dtype` as that of the weights, by the name that it has there:
// "torch_dtype" or "dtype". InvalidArgument: no JSON object.
absl::StatusOr<std::string> WithDtype(const std::string& config,
                                      c10::ScalarType dtype);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_EXPORT_H_
