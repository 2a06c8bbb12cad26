// The parameters of one group that lie in one storage, such as a flat shard,
// and their states.
#ifndef FSDP_OPTIM_FUSED_STRETCH_H_
#define FSDP_OPTIM_FUSED_STRETCH_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_runs.h"

namespace fsdp {

// OK, or why torch's fused kernels cannot step it: InvalidArgument, to be read
// after the parameter's name.
absl::Status CheckFusedParameter(const at::Tensor& parameter);

// Where it is stepped: on its device, or on the host (OffloadOptions::step_on).
c10::Device SteppingDevice(const at::Tensor& parameter);

// States lie in memory of their own that is laid out as the parameters are, and
// rests where the OffloadSpace of the parameters says.
class FusedStretch {
 public:
  // Parameters that pass CheckFusedParameter(), with their places in `group`.
  FusedStretch(size_t group,
               std::vector<std::pair<size_t, at::Tensor>> parameters);

  bool HasGradient() const;
  // InvalidArgument names the parameter whose gradient or state has another
  // shape, or cannot be used. FailedPrecondition: a Resident has it in memory.
  absl::Status Check(const FusedRule& rule, int num_slots,
                     const OptimizerStates& states) const;

  // What the parameters lie in; null for ordinary memory.
  RestingMemory* shard() const { return shard_.get(); }
  // Whether parameters, gradients or states may have to be brought in.
  bool RestsElsewhere() const;
  // A hint that Begin() is to come.
  void Prefetch() const;

  // Takes up the gradients and gives the parameters that have one a state in
  // this memory, copying what they have elsewhere. All of it is in memory until
  // Finish() or LetGo(). Errors as the stores'.
  absl::Status Begin(const FusedRule& rule, int num_slots,
                     OptimizerStates& states);
  // Of a stretch in memory, before Begin(): allocates what that would.
  absl::Status Reserve(int num_slots);
  // From Begin() to Finish().
  const std::vector<FusedRun>& runs() const { return runs_.runs(); }
  int64_t StepOf(const FusedRun& run) const { return slices_[run.slice].step; }
  // What is stepped and has a state, with its slots and the number of the step.
  std::vector<const FusedSlice*> counted() const;
  // After the kernels.
  void Finish();
  // After Finish(), when the step counts: before, states are as they were.
  void Count(const FusedRule& rule);
  // Instead of Finish(), after an error; its last act, too.
  void LetGo();
  // Instead of Count(): states that the step has made are gone.
  void Undo(OptimizerStates& states);
  // Moves states of `states` into memory that rests elsewhere, where that is
  // their place, and adds those that an earlier run has kept. After an error
  // some have been moved.
  absl::Status TakeUp(const FusedRule& rule, int num_slots,
                      OptimizerStates& states);
  // Before the stretch goes and its states stay: they get memory of their own.
  absl::Status Evacuate(const FusedRule& rule, OptimizerStates& states);

 private:
  // What goes with a slice, whose parameter is this one, or its bytes on the
  // host where it is stepped there.
  struct Member {
    size_t place;
    at::Tensor parameter;
    // Whether a slot may hold something else than zeros.
    std::array<bool, kMaxFusedSlots> used = {};
    torch::optim::OptimizerParamState* state = nullptr;  // during a step
    bool state_is_new = false;                           // made by it
  };

  absl::Status CheckMember(size_t i, const FusedRule& rule, int num_slots,
                           const OptimizerStates& states) const;
  absl::Status CheckNotInUse() const;
  absl::Status CheckState(size_t i, const FusedRule& rule, int num_slots,
                          const OptimizerStates& states) const;
  absl::Status BringIn();
  absl::Status BringInStates();
  absl::Status TakeUpMembers(const FusedRule& rule, int num_slots,
                             OptimizerStates& states);
  bool HasSlots(size_t i) const;
  absl::Status TakeSlot(size_t i, int k, const at::Tensor& held);
  absl::Status AllocateSlot(int k);
  bool keeps() const;
  absl::StatusOr<at::Tensor> Zeros(int64_t numel, const std::string& what);
  std::string PlaceNameOf(size_t i) const;
  absl::StatusOr<std::shared_ptr<RestingMemory>> Place(const std::string& what,
                                                       int64_t bytes,
                                                       c10::Device device);
  absl::Status Restore(const FusedRule& rule, int num_slots,
                       OptimizerStates& states);

  Where where() const { return on_host_ ? Where::kHost : Where::kDevice; }

  size_t group_;
  bool on_host_ = false;
  std::vector<FusedSlice> slices_;  // in the order of their addresses
  std::vector<Member> members_;
  int num_slots_ = 0;  // of the last Begin()
  std::shared_ptr<RestingMemory> shard_;
  std::map<std::string, std::shared_ptr<RestingMemory>> memory_;  // by what
  // Numbers of steps, where the space keeps states; undefined otherwise.
  at::Tensor kept_steps_;
  Resident resident_;  // from Begin() on
  FusedRuns runs_;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_STRETCH_H_
