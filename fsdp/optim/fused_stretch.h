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

// InvalidArgument: torch's fused kernels cannot step the parameter; the text
// continues its name.
absl::Status CheckFusedParameter(const at::Tensor& parameter);

// Returns where the parameter is stepped: its own device, or the host
// (OffloadOptions::step_on).
c10::Device SteppingDevice(const at::Tensor& parameter);

// States lie in memory that is laid out as the parameters are, and rests where
// the OffloadSpace of the parameters says.
class FusedStretch {
 public:
  // `parameters` pass CheckFusedParameter() and come with their places in
  // `group`.
  FusedStretch(size_t group,
               std::vector<std::pair<size_t, at::Tensor>> parameters);

  bool HasGradient() const;
  // InvalidArgument, with the parameter's name: its gradient or state has
  // another shape or cannot be used. FailedPrecondition: a Resident holds it.
  absl::Status Check(const FusedRule& rule, int num_slots,
                     const OptimizerStates& states) const;

  // The memory of the parameters; null if it belongs to no OffloadSpace.
  RestingMemory* shard() const { return shard_.get(); }
  // Returns whether parameters, gradients or states may have to be brought in.
  bool RestsElsewhere() const;
  // Hints that Begin() will come soon.
  void Prefetch() const;

  // Brings the stretch into memory until Finish() or LetGo(). Parameters with a
  // gradient get a state in the stretch's memory; one that they have in other
  // memory is copied. Errors are those of stores.
  absl::Status Begin(const FusedRule& rule, int num_slots,
                     OptimizerStates& states);
  // Allocates what Begin() would. It is for stretches that rest in memory.
  absl::Status Reserve(int num_slots);
  // The runs, valid from Begin() to Finish().
  const std::vector<FusedRun>& runs() const { return runs_.runs(); }
  int64_t StepOf(const FusedRun& run) const { return slices_[run.slice].step; }
  // Returns the slices that are stepped and have a state.
  std::vector<const FusedSlice*> counted() const;
  // Ends the step after the kernels, and calls LetGo().
  void Finish();
  // Writes the step's numbers and slots into the states, which are unchanged
  // until then. Follows Finish().
  void Count(const FusedRule& rule);
  // Lets the memory go; in place of Finish() after an error.
  void LetGo();
  // Erases the states that the step has made; in place of Count().
  void Undo(OptimizerStates& states);
  // Moves states that are in memory to where they rest, and adds those that an
  // earlier run has kept. After an error some have been moved.
  absl::Status TakeUp(const FusedRule& rule, int num_slots,
                      OptimizerStates& states);
  // Gives states memory of their own, before the stretch is destroyed.
  absl::Status Evacuate(const FusedRule& rule, OptimizerStates& states);

 private:
  // Belongs to a slice. The slice's parameter is this one, or its bytes on the
  // host if it is stepped there.
  struct Member {
    size_t place;
    at::Tensor parameter;
    // The slots that may hold other values than zeros.
    std::array<bool, kMaxFusedSlots> used = {};
    torch::optim::OptimizerParamState* state = nullptr;  // during a step
    bool state_is_new = false;                           // made by it
  };

  absl::Status CheckState(size_t i, const FusedRule& rule, int num_slots,
                          const OptimizerStates& states) const;
  absl::Status BringIn();
  absl::Status BringInStates();
  bool HasSlots(size_t i) const;
  absl::Status TakeSlot(size_t i, int k, const at::Tensor& held);
  absl::Status AllocateSlot(int k);
  bool keeps() const;
  absl::StatusOr<at::Tensor> Zeros(int64_t numel, const std::string& what);
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
  // The numbers of steps, if the space keeps states; else undefined.
  at::Tensor kept_steps_;
  Resident resident_;  // from Begin() to LetGo()
  FusedRuns runs_;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_STRETCH_H_
