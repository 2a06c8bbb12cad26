// Gives a captured step (fsdp/capture/step_capture.h) what it needs of its
// model besides the public calls.
#ifndef FSDP_MODEL_MODEL_CAPTURE_H_
#define FSDP_MODEL_MODEL_CAPTURE_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "absl/status/status.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {

// Serves one model, which must outlive it. The model's thread uses it between
// steps.
class ModelCapture {
 public:
  explicit ModelCapture(ShardedModel& model) : model_(model) {}

  // FailedPrecondition names what of the model cannot be captured.
  absl::Status CheckCapturable() const;
  // Frees what is gathered. FailedPrecondition inside a forward, a backward or
  // a scope of full parameters, or if NoSync() has left gradients.
  absl::Status PrepareStep();
  // Between these calls `log` gets what is carried out. Steps that begin so and
  // do the same use the same buffers.
  void BeginLoggedStep(StepLog& log) {
    model_.runtime_->BeginAlike();
    model_.runtime_->SetStepLog(&log);
  }
  void EndLoggedStep() { model_.runtime_->SetStepLog(nullptr); }
  // Finishes the check of the order of steps that is under way. Collective.
  absl::Status FinishOrder() { return model_.order_check_.Finish(); }

  // Does PrepareStep(), when the device has done all that it was given. Until
  // End() a failure aborts nothing, because nothing has been sent.
  absl::Status Begin();
  // Call these on the captured stream, at the beginning and at the end of what
  // is recorded: the model's streams are captured with it.
  void ForkStreams() { model_.runtime_->ForkStreams(); }
  void JoinStreams() { model_.runtime_->JoinStreams(); }
  // Ends the capture. If it is not `sound`, the captured step is given up.
  void End(bool sound);

  // Returns the memory that steps gather into, reduce from and keep gradients
  // in.
  std::vector<at::Tensor> StepMemory() const {
    return model_.runtime_->StepMemory();
  }
  // Notes that shards were written by ways that LibTorch does not see.
  void NoteReplay();

 private:
  ShardedModel& model_;
};

}  // namespace fsdp

#endif  // FSDP_MODEL_MODEL_CAPTURE_H_
