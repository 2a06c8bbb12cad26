// An exponential moving average of a model's weights (EMA), for evaluation and
// export. Each rank averages its own shards and sends nothing.
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

// Thread-compatible. Do not call it between a forward and its backward. The
// average takes as much memory as the shards, in float32 if their precision is
// lower, and is on their device even if they rest on an SSD.
class WeightAverage {
 public:
  // `parameters` are the leaves that an optimizer steps. Those that do not
  // require gradients at this time are left out.
  explicit WeightAverage(const std::vector<at::Tensor>& parameters);

  // Makes the average decay * average + (1 - decay) * weights. Call it after
  // the optimizer's step. The first call copies the weights. InvalidArgument:
  // `decay` is not between 0 and 1.
  absl::Status Update(double decay);

  // Runs `fn` while the model has the averaged weights, and then puts the
  // trained ones back, whatever `fn` returns or throws. Before the first
  // Update() both are the same. FailedPrecondition: InModel(), Update() or
  // saving inside `fn`. If the SSD on which weights rest fails, the model may
  // have some of both: load a checkpoint.
  absl::Status InModel(FallibleRef fn);
  bool is_in_model() const { return is_in_model_; }

  // Returns the average of `parameter`, for checkpoints. Before the first
  // Update() it is the parameter; if that is left out, it is undefined.
  at::Tensor Of(const at::Tensor& parameter) const;
  // Returns the average of `parameter`, to be overwritten, and makes averages
  // if there are none.
  absl::StatusOr<at::Tensor> ToFill(const at::Tensor& parameter);

 private:
  absl::Status Exchange();

  std::vector<at::Tensor> parameters_;
  std::map<const void*, size_t> indices_;  // in parameters_
  std::vector<at::Tensor> averages_;       // empty before the first Update()
  // Weights of a dtype other than their average's, while that is in the model.
  std::vector<at::Tensor> weights_;
  bool is_in_model_ = false;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_WEIGHT_AVERAGE_H_
