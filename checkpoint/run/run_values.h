// The tensors of a run by name, where they are: what this rank writes of each,
// and what it has to read.
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
#include "fsdp/model/named_shard.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/whole_access.h"

namespace fsdp::checkpoint {

// The ranks of a model that FullyShard() has made; of one that is not sharded,
// `otherwise`.
comm::Communicator* RanksOf(torch::nn::Module& module,
                            comm::Communicator* otherwise = nullptr);

// As long as it lives, a sharded model is refused to others.
class RunValues {
 public:
  // On this rank alone: no messages. `what`: the caller, for texts.
  // InvalidArgument: no model; one that has sharded modules inside without
  // being one, or is inside one; an optimizer of another class or of other
  // parameters.
  // FailedPrecondition: inside a forward or backward, or
  // WeightAverage::InModel().
  static absl::StatusOr<RunValues> Read(const TrainingRun& run,
                                        absl::string_view what);

  // Null: the model is not sharded.
  ShardedModel* sharded() const { return sharded_; }
  // InvalidArgument: a model that is sharded over other ranks than these.
  absl::Status CheckRanks(int rank, int world_size) const;
  // See ShardedModel::CheckLoaded().
  absl::Status CheckLoaded() const;
  // Where the model computes; the CPU if it has no parameters.
  c10::Device device() const;
  // Names without wrappers. `values` of a model that is not sharded is the
  // whole parameter, of any sizes.
  const ModelValues& model() const { return model_; }
  // What an optimizer may step, in the order of model().parameters, and behind
  // them parameters that are not sharded though the model is, each whole.
  const std::vector<NamedShard>& leaves() const { return leaves_; }
  // Of each of leaves() in TrainingRun::average; undefined where it has none.
  // Empty without it.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  // Null without one.
  const OptimizerValues* optimizer() const {
    return optimizer_.has_value() ? &*optimizer_ : nullptr;
  }
  // The states of optimizer(), by parameter, which are not held here any more.
  std::map<std::string, OptimizerSlots> ReleaseStates();

 private:
  RunValues() = default;
  absl::Status ReadSharded(const TrainingRun& run, absl::string_view what);
  absl::Status ReadPlain(const torch::nn::Module& module);

  ShardedModel* sharded_ = nullptr;
  std::optional<WholeAccess> access_;
  ModelValues model_;
  std::vector<NamedShard> leaves_;
  std::vector<at::Tensor> averages_;
  std::optional<OptimizerValues> optimizer_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RUN_VALUES_H_
