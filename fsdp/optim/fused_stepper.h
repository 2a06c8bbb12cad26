// Steps all parameters of an optimizer in as few calls of torch's fused kernels
// as possible: one for each parameter group, dtype and device.
#ifndef FSDP_OPTIM_FUSED_STEPPER_H_
#define FSDP_OPTIM_FUSED_STEPPER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_runs.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class OffloadSpace;

// InvalidArgument: torch's fused kernels cannot step the parameter; the text
// continues its name.
absl::Status CheckFusedParameter(const at::Tensor& parameter);

// Returns where the parameter is stepped: its own device, or the host
// (OffloadOptions::step_on).
c10::Device SteppingDevice(const at::Tensor& parameter);

// The parameters of one group that lie in one storage, such as a flat shard,
// and their states. States lie in memory that is laid out as the parameters
// are, and rests where the OffloadSpace of the parameters says.
class FusedStretch {
 public:
  // `parameters` pass CheckFusedParameter() and come with their places in
  // `group`. `rule` must outlive this object.
  FusedStretch(const FusedRule& rule, size_t group,
               std::vector<std::pair<size_t, at::Tensor>> parameters);

  bool HasGradient() const;
  // InvalidArgument, with the parameter's name: its gradient or state has
  // another shape or cannot be used. FailedPrecondition: a Resident holds it.
  absl::Status Check(int num_slots, const OptimizerStates& states) const;

  // The memory of the parameters; null if it belongs to no OffloadSpace.
  RestingMemory* shard() const { return shard_.get(); }
  // Returns whether parameters, gradients or states may have to be brought in.
  bool RestsElsewhere() const;
  // Hints that Begin() will come soon.
  void Prefetch() const;

  // Brings the stretch into memory until Finish() or LetGo(). Parameters with a
  // gradient get a state in the stretch's memory; one that they have in other
  // memory is copied. Errors are those of stores.
  absl::Status Begin(int num_slots, OptimizerStates& states);
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
  void Count();
  // Lets the memory go; in place of Finish() after an error.
  void LetGo();
  // Takes the gradients of parameters that are not in `kept` away. Returns them
  // with their parameters.
  std::vector<std::pair<at::Tensor, at::Tensor>> TakeGradients(
      const std::set<const void*>& kept) const;
  // Erases the states that the step has made; in place of Count().
  void Undo(OptimizerStates& states);
  // Moves states that are in memory to where they rest, and adds those that an
  // earlier run has kept. After an error some have been moved.
  absl::Status TakeUp(int num_slots, OptimizerStates& states);
  // Gives states memory of their own, before the stretch is destroyed.
  absl::Status Evacuate(OptimizerStates& states);

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

  absl::Status CheckState(size_t i, int num_slots,
                          const OptimizerStates& states) const;
  absl::Status BringInStates();
  bool HasSlots(size_t i) const;
  absl::Status TakeSlot(size_t i, int k, const at::Tensor& held);
  absl::Status AllocateSlot(int k);
  bool keeps() const;
  absl::StatusOr<at::Tensor> Zeros(int64_t numel, const std::string& what);
  absl::StatusOr<std::shared_ptr<RestingMemory>> Place(const std::string& what,
                                                       int64_t bytes,
                                                       c10::Device device);
  absl::Status Restore(int num_slots, OptimizerStates& states);

  const FusedRule* rule_;
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

// Parameters are known by their tensor objects; groups may change between
// steps. After the first step it allocates tensors only for gradients whose
// elements are in another order in memory than their parameters'. Not
// thread-safe.
//
// Parameters and states that rest off the device (fsdp/resting/offload_space.h)
// are brought in, stepped and taken back one stretch at a time, while the next
// are read and the last are written, as ZeRO-Infinity does (Rajbhandari et al.,
// 2021).
class FusedStepper {
 public:
  using Optimizer = torch::optim::Optimizer;

  explicit FusedStepper(std::unique_ptr<const FusedRule> rule)
      : rule_(std::move(rule)) {}

  const FusedRule& rule() const { return *rule_; }

  // Steps every parameter of `optimizer` that has a gradient. InvalidArgument,
  // with nothing changed: the kernels cannot step a parameter, which the text
  // names. With parameters of an OffloadSpace it is collective, and all errors
  // are those of EndStep(): other ranks may have stepped some.
  absl::Status Step(Optimizer& optimizer);
  // Steps `shards`, those of whole units, and drops their gradients. Of other
  // shards it looks at those in the same memory, and steps none. It is never
  // collective: what was stepped before an error is not undone.
  absl::Status StepShards(absl::Span<const TensorRange> shards,
                          Optimizer& optimizer);
  // See CapturableOptimizer. The parameters of groups must not change between a
  // capture and its replays.
  void KeepRatesOnDevice() { rates_on_device_ = true; }
  absl::StatusOr<int64_t> BeginCapture(Optimizer& optimizer);
  void EndCapture(Optimizer& optimizer);
  absl::Status PrepareReplay(int64_t capture, Optimizer& optimizer);
  void CountReplay(Optimizer& optimizer);

  // Implements RestingStates (resting_places.h) for the stretches that contain
  // `parameters`.
  absl::Status TakeUpStatesOf(absl::Span<const at::Tensor> parameters,
                              Optimizer& optimizer);

 private:
  // The stretches that go into one call.
  struct Batch {
    size_t group;
    at::Device device;
    at::ScalarType dtype;
    std::vector<FusedStretch> stretches = {};
    std::vector<FusedStretch*> due = {};
    // Numbers of steps as tensors, those in use first.
    std::vector<std::pair<int64_t, at::Tensor>> steps = {};
    size_t steps_in_use = 0;
    at::Tensor converted = {};  // memory for a run in the kernel's dtype
    at::Tensor rate = {};       // on the device; after KeepRatesOnDevice()
    double rate_value = 0;
  };
  // One parameter's state in a captured step.
  struct CapturedState {
    void* parameter;
    FusedSlots slots;
    int64_t number;   // of the step that is captured, then replayed
    at::Tensor step;  // the replay reads the number here
  };
  struct CapturedStep {
    int64_t number = 0;  // counts captures, from 1 on
    bool is_under_way = false;
    // The options of each group.
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
    std::vector<const void*> parameters;  // arranged_ at the capture
    std::vector<CapturedState> states;
  };
  // The indices of a parameter's stretch.
  struct Place {
    size_t batch;
    size_t stretch;
  };

  // Makes the batches, unless there are those of its groups already.
  absl::Status Arrange(Optimizer& optimizer);
  bool IsArranged(const Optimizer& optimizer) const;
  absl::Status ArrangeGroup(size_t index,
                            const torch::optim::OptimizerParamGroup& group);
  size_t BatchOf(size_t group, const at::Tensor& parameter);
  int NumSlots(const Batch& batch, const Optimizer& optimizer) const;

  // A stretch that is due and rests off the device.
  struct Streamed {
    Batch* batch;
    FusedStretch* stretch;
  };

  // Steps what is due, unless `status` is an error, which other ranks are told
  // if they step with this one.
  absl::Status StepDue(absl::Status status, Optimizer& optimizer,
                       bool all_or_nothing);
  std::vector<Streamed> TakeStreamed();
  absl::Status ReserveDue(const Optimizer& optimizer);
  absl::Status Stream(absl::Span<const Streamed> streamed, Optimizer& optimizer,
                      bool save);
  absl::Status StepTogether(Batch& batch,
                            absl::Span<FusedStretch* const> stretches,
                            Optimizer& optimizer);
  absl::Status CallKernels(Batch& batch,
                           absl::Span<FusedStretch* const> stretches,
                           Optimizer& optimizer);
  const at::Tensor& StepNumber(Batch& batch, int64_t step);
  const at::Tensor& RateOf(Batch& batch,
                           const torch::optim::OptimizerOptions& options);
  absl::Status NoteCaptured(Batch& batch, const FusedStretch& stretch);
  absl::Status CheckUnchanged(const Optimizer& optimizer) const;
  // Sets the states' steps to those of the captured ones and `offset`.
  void SetSteps(int64_t offset, Optimizer& optimizer) const;
  absl::Status TakeUpCaptured(CapturedState& captured, OptimizerStates& states);
  void CallConverted(Batch& batch, const FusedRun& run, int64_t step,
                     const torch::optim::OptimizerOptions& options);

  const std::unique_ptr<const FusedRule> rule_;
  std::vector<const void*> arranged_;  // parameters, null after each group
  std::vector<Batch> batches_;
  std::unordered_map<const void*, Place> places_;
  // The spaces of the parameters, each once, in their order.
  std::vector<std::shared_ptr<OffloadSpace>> spaces_;
  // Tells OffloadSpace that this stepper lives.
  std::shared_ptr<const void> identity_ = std::make_shared<char>();
  bool rates_on_device_ = false;
  CapturedStep captured_;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_STEPPER_H_
