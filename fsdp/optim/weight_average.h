// An exponential moving average of a model's weights (EMA), for evaluation and
// export. Each rank averages its own shards: no messages.
//
//   fsdp::WeightAverage average(model->Parameters());
//   run.average = &average;             // a checkpoint::TrainingRun saves it
//   ... optimizer.step();
//   status = average.Update(0.999);
//   status = average.InModel([&] { return Evaluate(*model); });
#ifndef FSDP_OPTIM_WEIGHT_AVERAGE_H_
#define FSDP_OPTIM_WEIGHT_AVERAGE_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/torch_status.h"

namespace fsdp {

// Thread-compatible. Not between a forward and its backward. The average takes
// as much memory as the shards, in float32 where they are of a lower precision,
// on their device also where they rest on an SSD.
class WeightAverage {
 public:
  // `parameters`: the leaves that an optimizer steps. Those that do not require
  // gradients now are left out.
  explicit WeightAverage(const std::vector<at::Tensor>& parameters);

  // To be called after the optimizer's step: the average becomes
  // decay * average + (1 - decay) * weights. The first call copies the weights.
  // InvalidArgument: `decay` is not between 0 and 1.
  absl::Status Update(double decay);

  // Runs `fn` while the weights of the model are the average, and then puts the
  // trained ones back, whatever it returns or throws. Before the first Update()
  // they are the same. Nested calls, Update() and saving meanwhile:
  // FailedPrecondition. After an error of the SSD on which weights rest, the
  // model may have some of either: load a checkpoint.
  absl::Status InModel(FallibleRef fn);
  bool is_in_model() const { return is_in_model_; }

  // For checkpoints: the average of `parameter`, itself before the first
  // Update(); undefined where it is left out.
  at::Tensor Of(const at::Tensor& parameter) const;
  // The same, to be overwritten: from here on there is an average.
  absl::StatusOr<at::Tensor> ToFill(const at::Tensor& parameter);

 private:
  absl::Status Exchange();

  std::vector<at::Tensor> parameters_;
  std::map<const void*, size_t> indices_;  // in parameters_
  std::vector<at::Tensor> averages_;       // empty before the first Update()
  // Of parameters of another dtype than their average, while that is in them.
  std::vector<at::Tensor> weights_;
  bool is_in_model_ = false;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_WEIGHT_AVERAGE_H_
