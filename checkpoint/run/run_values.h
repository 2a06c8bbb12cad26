// The tensors of a run by name, where they are: from them follows what this
// rank writes and reads of each.
#ifndef CHECKPOINT_RUN_RUN_VALUES_H_
#define CHECKPOINT_RUN_RUN_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/whole_access.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// Returns the ranks of a model that FullyShard() has returned, and `otherwise`
// for one that is not sharded.
comm::Communicator* RanksOf(torch::nn::Module& module,
                            comm::Communicator* otherwise = nullptr);

// While it lives, all others are refused access to a sharded model.
class RunValues {
 public:
  // Reads the run of this rank, without messages. `what` names the caller in
  // errors. InvalidArgument: there is no model; it has sharded modules inside
  // without being one, or is inside one; the optimizer is of another class or
  // has other parameters. FailedPrecondition: inside a forward, a backward or
  // WeightAverage::InModel().
  static absl::StatusOr<RunValues> Read(const TrainingRun& run,
                                        absl::string_view what);

  // Null if the model is not sharded.
  ShardedModel* sharded() const { return sharded_; }
  // InvalidArgument: the model is sharded over other ranks than these.
  absl::Status CheckRanks(int rank, int world_size) const;
  // See ShardedModel::CheckLoaded().
  absl::Status CheckLoaded() const;
  // The device on which the model computes; the CPU if it has no parameters.
  c10::Device device() const;
  // Names are without wrappers.
  const ModelValues& model() const { return model_; }
  // The averages of model().parameters() that TrainingRun::average has, in
  // their order. Unset if the run has no average.
  const std::optional<std::vector<TensorRange>>& averages() const {
    return averages_;
  }
  // Null if the run has no optimizer.
  const OptimizerValues* optimizer() const {
    return optimizer_.has_value() ? &*optimizer_ : nullptr;
  }
  // Returns the states of optimizer() by parameter, and forgets them.
  std::map<std::string, OptimizerSlots> ReleaseStates();

 private:
  RunValues() = default;
  absl::Status ReadSharded(const TrainingRun& run, absl::string_view what);
  absl::Status ReadPlain(const torch::nn::Module& module);

  ShardedModel* sharded_ = nullptr;
  std::optional<WholeAccess> access_;
  ModelValues model_;
  std::optional<std::vector<TensorRange>> averages_;
  std::optional<OptimizerValues> optimizer_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RUN_VALUES_H_
