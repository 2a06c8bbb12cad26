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

// The files of a model's folder that are neither weights nor their index, by
// name: config.json, the tokenizer's, processors', licence. Not those of its
// folders, hidden ones, those larger than 64 MiB, and what says that the folder
// is something else: an adapter, a checkpoint. Errors name the file.
absl::StatusOr<std::map<std::string, std::string>> TextsBeside(
    const std::string& folder);

// A new folder: the model in `dtype`, with `texts` of the model that it was
// made from. Adapters are merged into the model, which has them merged from
// then on. Collective.
absl::Status ExportTrained(const std::string& folder,
                           std::map<std::string, std::string> texts,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_EXPORT_H_
