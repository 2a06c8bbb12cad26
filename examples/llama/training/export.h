// Exports the trained model.
#ifndef EXAMPLES_LLAMA_TRAINING_EXPORT_H_
#define EXAMPLES_LLAMA_TRAINING_EXPORT_H_

#include <c10/core/ScalarType.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/training/model.h"

namespace llama {

// Returns the files of a model's folder that are neither weights nor an index,
// by name: config.json, the tokenizer's, processors', licence. It leaves out
// folders, hidden files, files larger than 64 MiB, and files that would make
// the folder an adapter or a checkpoint. Errors name the file.
absl::StatusOr<std::map<std::string, std::string>> TextsBeside(
    const std::string& folder);

// Writes the model in `dtype` to a new folder, with the `texts` of the model it
// was made from. Adapters are merged into the model, which stays so.
// Collective.
absl::Status ExportTrained(const std::string& folder,
                           std::map<std::string, std::string> texts,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_EXPORT_H_
