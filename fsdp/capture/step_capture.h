// Training steps that are captured once and replayed as a whole: forward,
// backward, collectives and the optimizer's step cost the host one launch.
//
//   fsdp::CaptureOptions options;
//   options.make_graph = fsdp::MakeCudaGraph;  // base/cuda_graph.h
//   auto step = fsdp::CapturedStep::Make(
//       *model, optimizer,
//       [&](const std::vector<at::Tensor>& in) -> absl::StatusOr<at::Tensor> {
//         at::Tensor loss = Loss(model->forward(in[0]), in[1]);
//         FSDP_RETURN_IF_ERROR(model->Backward(loss));
//         FSDP_RETURN_IF_ERROR(model->ClipGradNorm(1.0).status());
//         optimizer.step();
//         optimizer.zero_grad();
//         return loss;
//       },
//       options);
//   for each batch: loss = (*step)->Run({batch.x, batch.y});
#ifndef FSDP_CAPTURE_STEP_CAPTURE_H_
#define FSDP_CAPTURE_STEP_CAPTURE_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_streams.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp {

class CapturableOptimizer;
class ModelCapture;
struct StepRecord;

// The same on all ranks.
struct CaptureOptions {
  DeviceGraphMaker make_graph;
  // Steps that run as they are before one is captured. The first allocates,
  // the second prefetches; the last two are compared. At least 3.
  int warm_up_steps = 3;
};

// Of one rank; all ranks make the same calls. A replay does on the device what
// the captured step has done, to the same memory, with the bits that the step
// would have. What the host does in the step it does no more: everything that
// depends on the host, but for inputs, learning rates and numbers of steps,
// stays as it was when the step was captured, control flow above all. Between
// calls the model is as between steps: state dicts, evaluation and steps that
// are not captured see what replays have done, given to the stream of Run().
//
// Gradients of before are overwritten by the next replay, whoever has kept
// them. A replay's collectives have no deadline of their own: whoever waits for
// its loss needs one, also where one rank alone was refused a replay. Used by
// the model's thread.
class CapturedStep {
 public:
  using Inputs = std::vector<at::Tensor>;
  // One whole step: forward, backward, optimizer's step, gradients dropped as
  // they were before. Any number of micro-batches, always the same. Gives back
  // the loss, or whatever tensor. It is called in the warm-up and once for each
  // capture.
  using Step = std::function<absl::StatusOr<at::Tensor>(const Inputs&)>;

  // `model` and `optimizer` outlive the result. FailedPrecondition,
  // Unimplemented and InvalidArgument name what of the model, its groups, the
  // optimizer or the options cannot be captured. Learning rates are floats from
  // then on (CapturableOptimizer::KeepRatesOnDevice).
  static absl::StatusOr<std::unique_ptr<CapturedStep>> Make(
      ShardedModuleBase& model, torch::optim::Optimizer& optimizer, Step step,
      const CaptureOptions& options);
  ~CapturedStep();

  // One step with copies of `inputs`, which have the sizes and dtypes of the
  // first call's; the device reads page-locked ones of the host later, as
  // copy_(input, true) does. Returns a tensor of this object's own, which the
  // next call overwrites. The first warm_up_steps run as they are, the next one
  // is captured, on all ranks or on none, and replayed at once, and so are all
  // that follow. Collective.
  //
  // Errors of a step that runs are the step's. FailedPrecondition:
  //   in place of the first replay: the last two steps were not alike, or what
  //   was captured could not be. No step was made, and every later call returns
  //   this; the model trains on without captures.
  //   later: something has changed since. Nothing was done; Recapture() or undo
  //   it.
  absl::StatusOr<at::Tensor> Run(const Inputs& inputs);

  // The next calls warm up and capture again.
  void Recapture();

  int64_t replays() const { return replays_; }

 private:
  // A tensor that has to stay where it is.
  struct Pinned {
    at::Tensor tensor;
    const void* address;
    bool requires_grad;
  };

  CapturedStep(ShardedModuleBase& model, CapturableOptimizer& optimizer,
               Step step, const CaptureOptions& options,
               std::unique_ptr<DeviceGraph> graph);

  absl::Status RunOrReplay(const Inputs& inputs);
  absl::Status Agree(const absl::Status& mine);
  absl::Status TakeInputs(const Inputs& inputs);
  absl::Status WarmUp();
  absl::Status CallStep();
  absl::Status Capture();
  absl::Status AwaitDevice();
  absl::Status CaptureHere();
  absl::Status Record();
  absl::Status CheckAlike() const;
  void Pin();
  std::vector<const void*> Gradients() const;
  absl::Status CheckGradients() const;
  absl::Status CheckPlaces() const;
  absl::Status Replay();

  ShardedModuleBase& model_;
  const std::unique_ptr<ModelCapture> capture_;
  CapturableOptimizer& optimizer_;
  const Step step_;
  const CaptureOptions options_;
  std::unique_ptr<DeviceGraph> graph_;
  SideStream stream_;  // of warm-up and capture
  int steps_ = 0;      // of the warm-up
  bool is_captured_ = false;
  int64_t replays_ = 0;
  absl::Status failure_;
  Inputs inputs_;
  at::Tensor result_;
  std::vector<StepRecord> last_;
  std::vector<StepRecord> before_last_;
  std::vector<at::Tensor> memory_;  // that replays use
  int64_t optimizer_capture_ = 0;
  std::vector<Pinned> shards_;
  std::vector<const void*> gradients_;  // before and after a step
};

}  // namespace fsdp

#endif  // FSDP_CAPTURE_STEP_CAPTURE_H_
