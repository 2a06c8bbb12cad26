// Captures a training step once and replays it as a whole: forward, backward,
// collectives and the optimizer's step cost the host one launch.
//
//   fsdp::CaptureOptions options;
//   options.make_graph = fsdp::MakeCudaGraph;  // in //base:cuda_graph
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
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_graph.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp {

class CapturableOptimizer;
class ShardedModel;
class SideStream;
struct StepRecord;

// Options of a CapturedStep. They are the same on all ranks.
struct CaptureOptions {
  DeviceGraphMaker make_graph;  // such as MakeCudaGraph; not null
  // Steps that run uncaptured before one is captured; at least 3. The first
  // allocates, the second prefetches, and the last two are compared.
  int warm_up_steps = 3;
};

// Captures and replays steps on one rank; all ranks make the same calls. A
// replay does on the device what the captured step did, in the same memory and
// with the bits that the step would have. It does nothing of what the step does
// on the host: all that depends on the host, control flow above all, stays as
// captured, except inputs, learning rates and numbers of steps. Between calls
// the model is as between steps: state dicts, evaluation and uncaptured steps
// see what replays have given to the stream of Run().
//
// A replay overwrites gradients of earlier steps, even if somebody has kept
// them. Its collectives have no deadline, so whoever waits for its loss needs
// one, also in case one rank alone is refused a replay. Used by the model's
// thread.
class CapturedStep {
 public:
  using Inputs = std::vector<at::Tensor>;  // a batch
  // One complete step: forward, backward, the optimizer's step, gradients
  // dropped as before it, and any number of micro-batches, always the same.
  // Returns the loss or any other tensor. It is called in the warm-up and once
  // for each capture.
  using Step = std::function<absl::StatusOr<at::Tensor>(const Inputs&)>;

  // `model` and `optimizer` must outlive the result. FailedPrecondition and
  // InvalidArgument name what cannot be captured: a part of the model, its
  // groups, the optimizer or an option. Learning rates become floats
  // (CapturableOptimizer::KeepRatesOnDevice).
  static absl::StatusOr<std::unique_ptr<CapturedStep>> Make(
      ShardedModuleBase& model, torch::optim::Optimizer& optimizer, Step step,
      const CaptureOptions& options);
  ~CapturedStep();

  // Makes one step with copies of `inputs`, which have the sizes and dtypes of
  // the first call's. The device reads page-locked inputs later, as
  // copy_(input, true) does. Inputs are dense. Returns a tensor of this
  // object's own, which the next call overwrites. The first warm_up_steps calls
  // run the step; the next captures it, on all ranks or on none, and replays
  // it, as later calls do. Collective.
  //
  // A step that runs returns its own errors, the same on all ranks.
  // FailedPrecondition:
  //   - in place of the first replay: the last two steps differ, or the step
  //     cannot be captured. No step was made, and every later call returns
  //     this; the model trains on without captures.
  //   - later: something has changed since the capture. Nothing was done; undo
  //     the change or call Recapture().
  absl::StatusOr<at::Tensor> Run(const Inputs& inputs);

  // Makes the next calls warm up and capture again.
  void Recapture();

  // Returns how many steps were replays, since this was made.
  int64_t replays() const { return replays_; }

 private:
  // A tensor that must stay at its address.
  struct Pinned {
    at::Tensor tensor;
    const void* address;
    bool requires_grad;
  };

  CapturedStep(ShardedModel& model, CapturableOptimizer& optimizer, Step step,
               const CaptureOptions& options,
               std::unique_ptr<DeviceGraph> graph);

  absl::Status Agree(const absl::Status& mine);
  absl::Status PrepareStep();
  absl::Status TakeInputs(const Inputs& inputs);
  absl::Status WarmUp();
  absl::Status CallStep();
  absl::Status Capture();
  absl::Status AwaitDevice();
  absl::Status CaptureHere();
  absl::Status CheckAlike() const;
  std::vector<const void*> Gradients() const;
  std::vector<at::Tensor> Buffers() const;
  std::vector<double> Settings() const;
  absl::Status CheckGradients() const;
  absl::Status CheckPlaces() const;
  absl::Status Replay();

  ShardedModel& model_;
  CapturableOptimizer& optimizer_;
  const Step step_;
  const CaptureOptions options_;
  std::unique_ptr<DeviceGraph> graph_;
  const std::unique_ptr<SideStream> stream_;  // for warm-up and capture
  int steps_ = 0;                             // so far in the warm-up
  bool is_captured_ = false;
  int64_t replays_ = 0;
  absl::Status failure_;
  std::optional<Inputs> inputs_;  // none before the first call
  at::Tensor result_;
  std::vector<StepRecord> last_;
  std::vector<StepRecord> before_last_;
  std::vector<at::Tensor> memory_;  // what replays use
  int64_t optimizer_capture_ = 0;
  std::vector<Pinned> shards_;
  std::vector<at::Tensor> buffers_;  // share the memory of the model's
  std::vector<double> settings_;
  std::vector<const void*> gradients_;  // addresses, before and after a step
};

}  // namespace fsdp

#endif  // FSDP_CAPTURE_STEP_CAPTURE_H_
