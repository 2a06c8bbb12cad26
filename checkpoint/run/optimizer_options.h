// Options of torch::optim's optimizers as JSON.
#ifndef CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_
#define CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/json.h"

namespace fsdp::checkpoint {

// {"class": "AdamW", "lr": 0.001, "betas": [0.9, 0.999], ...}, for SGD, Adam,
// AdamW, Adagrad and RMSprop. InvalidArgument: of another class, or a number
// that is not finite, which JSON cannot say.
absl::StatusOr<Json> OptionsToJson(
    const torch::optim::OptimizerOptions& options);

// The options, of the class that `json` names. InvalidArgument: a class that is
// not known, or members that are missing, unexpected or of another type.
absl::StatusOr<std::unique_ptr<torch::optim::OptimizerOptions>> OptionsFromJson(
    const Json& json);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_
