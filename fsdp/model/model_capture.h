// What a captured step (fsdp/capture/step_capture.h) asks of its model besides
// what a model offers to everybody.
#ifndef FSDP_MODEL_MODEL_CAPTURE_H_
#define FSDP_MODEL_MODEL_CAPTURE_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/status/status.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {

// Of one model, which outlives it; used between steps by the model's thread.
class ModelCapture {
 public:
  explicit ModelCapture(ShardedModel& model) : model_(model) {}

  // Whether the steps of this model can be captured; FailedPrecondition or
  // Unimplemented name what cannot be.
  absl::Status CheckCapturable() const;
  // FailedPrecondition inside a forward, a backward or a scope of full
  // parameters, and where NoSync() has left gradients. Frees what is gathered.
  absl::Status PrepareStep();
  // Between these `log` gets what is carried out. Steps that begin so and do
  // the same use the same buffers.
  void BeginLoggedStep(StepLog& log);
  void EndLoggedStep();
  // The check of the order of steps that is under way. Collective.
  absl::Status FinishOrder();

  // PrepareStep(), the device having done all that it was given. Until End() a
  // failure aborts nothing, since nothing has been sent.
  absl::Status Begin();
  // At the beginning of what is recorded, and at its end, on the captured
  // stream: the model's streams are captured with it, too.
  void ForkStreams();
  void JoinStreams();
  // `sound`: the step has been captured; else it is given up.
  void End(bool sound);

  // What steps gather into, reduce from and keep gradients in.
  std::vector<at::Tensor> StepMemory() const;
  // That shards have been written by ways that LibTorch does not see.
  void NoteReplay();

 private:
  ShardedModel& model_;
};

}  // namespace fsdp

#endif  // FSDP_MODEL_MODEL_CAPTURE_H_
