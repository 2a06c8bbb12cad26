// The model's parameters in safetensors files, whole and under their own names.
#ifndef EXAMPLES_GPT_CHECKPOINT_H_
#define EXAMPLES_GPT_CHECKPOINT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "examples/gpt/model.h"
#include "examples/gpt/safetensors.h"
#include "examples/gpt/trainable_model.h"

namespace gpt {

// Names, shapes and dtypes of a model that is not sharded yet.
std::vector<TensorSpec> ParameterSpecs(const GptImpl& model);

// Overwrites all parameters. The file has exactly these, or an error says which
// one is missing, too much, or of another shape or dtype.
absl::Status LoadParameters(const std::string& path, GptImpl& model);

// Rank 0 writes the file while the ranks gather one unit after the other.
// Collective: when rank 0 cannot write, every rank returns its error.
absl::Status SaveParameters(const std::string& path,
                            absl::Span<const TensorSpec> specs,
                            TrainableModel& model,
                            fsdp::comm::Communicator& communicator);

}  // namespace gpt

#endif  // EXAMPLES_GPT_CHECKPOINT_H_
