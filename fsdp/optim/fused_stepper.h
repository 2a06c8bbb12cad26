// Steps all parameters of an optimizer in as few calls of torch's fused kernels
// as there can be: one for each parameter group, dtype and device.
#ifndef FSDP_OPTIM_FUSED_STEPPER_H_
#define FSDP_OPTIM_FUSED_STEPPER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/model/named_shard.h"
#include "fsdp/optim/fused_runs.h"
#include "fsdp/optim/fused_stretch.h"

namespace fsdp {

class OffloadSpace;

// Parameters are known by their tensor objects; groups may change between
// steps. After the first step no tensors are allocated, but for gradients whose
// elements are in another order in memory than their parameters'. Not
// thread-safe.
//
// What rests elsewhere (fsdp/resting/offload_space.h) is brought in, stepped
// and taken back one stretch at a time, the next ones being read and the last
// ones written meanwhile, as ZeRO-Infinity does (Rajbhandari et al., 2021).
class FusedStepper {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  explicit FusedStepper(std::unique_ptr<const FusedRule> rule)
      : rule_(std::move(rule)) {}

  const FusedRule& rule() const { return *rule_; }

  // Steps every parameter of `groups` that has a gradient. InvalidArgument,
  // with nothing changed, names one that the kernels cannot step. With
  // parameters of an OffloadSpace it is collective, and its EndStep() tells of
  // errors of stores.
  absl::Status Step(const Groups& groups, OptimizerStates& states);
  // The same for `shards`, those of whole units, at their cost alone, and never
  // collective: what was stepped before an error stays so. Drops their
  // gradients.
  absl::Status StepShards(absl::Span<const NamedShard> shards,
                          const Groups& groups, OptimizerStates& states);
  // See CapturableOptimizer. Between a capture and its replays groups have the
  // same parameters.
  void KeepRatesOnDevice() { rates_on_device_ = true; }
  absl::StatusOr<int64_t> BeginCapture(const Groups& groups,
                                       OptimizerStates& states);
  void EndCapture(OptimizerStates& states);
  absl::Status PrepareReplay(int64_t capture, const Groups& groups,
                             OptimizerStates& states);
  void CountReplay(OptimizerStates& states);

  // Moves states that lie in memory to where they rest, and adds those that an
  // earlier run has kept (OffloadOptions::keep).
  absl::Status TakeUpStates(const Groups& groups, OptimizerStates& states);
  // Of the stretches that these are in.
  absl::Status TakeUpStatesOf(absl::Span<const at::Tensor> parameters,
                              const Groups& groups, OptimizerStates& states);

 private:
  // What goes into one call.
  struct Batch {
    size_t group;
    at::Device device;
    at::ScalarType dtype;
    std::vector<FusedStretch> stretches;
    std::vector<FusedStretch*> due;
    // Numbers of steps as tensors, those in use first.
    std::vector<std::pair<int64_t, at::Tensor>> steps;
    size_t steps_in_use = 0;
    at::Tensor converted;  // memory for a run in the kernel's dtype
    at::Tensor rate;       // where rates are numbers of the device
    double rate_value = 0;
  };
  // What a captured step counts in, by the parameter.
  struct CapturedState {
    void* parameter;
    FusedSlots slots;
    int64_t number;   // of the step that is captured, then replayed
    at::Tensor step;  // where it reads the number
  };
  struct CapturedStep {
    int64_t number = 0;  // of all captures, from 1 on
    bool is_under_way = false;
    // Of the groups.
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
    std::vector<const void*> parameters;  // as arranged_
    std::vector<CapturedState> states;
  };
  // Where a parameter is.
  struct Place {
    size_t batch;
    size_t stretch;
  };

  // Makes the batches unless they are those of `groups`.
  absl::Status Arrange(const Groups& groups, OptimizerStates& states);
  bool IsArranged(const Groups& groups) const;
  absl::Status ArrangeGroup(size_t index,
                            const torch::optim::OptimizerParamGroup& group);
  size_t BatchOf(size_t group, const at::Tensor& parameter);

  // What is due and rests elsewhere.
  struct Streamed {
    Batch* batch;
    FusedStretch* stretch;
  };

  absl::Status CheckDue(const Groups& groups,
                        const OptimizerStates& states) const;
  absl::Status StepDue(const Groups& groups, OptimizerStates& states,
                       bool all_or_nothing);
  std::vector<Streamed> TakeStreamed();
  absl::Status ReserveDue(const Groups& groups);
  absl::Status BeginSteps(const absl::Status& mine);
  absl::Status EndSteps(const absl::Status& mine);
  absl::Status Stream(absl::Span<const Streamed> streamed, const Groups& groups,
                      OptimizerStates& states, bool save);
  absl::Status StepTogether(Batch& batch,
                            absl::Span<FusedStretch* const> stretches,
                            const torch::optim::OptimizerOptions& options,
                            OptimizerStates& states);
  absl::Status CallKernels(Batch& batch,
                           absl::Span<FusedStretch* const> stretches,
                           const torch::optim::OptimizerOptions& options,
                           OptimizerStates& states);
  const at::Tensor& StepNumber(Batch& batch, int64_t step);
  const at::Tensor& RateOf(Batch& batch,
                           const torch::optim::OptimizerOptions& options);
  absl::Status NoteCaptured(Batch& batch, const FusedStretch& stretch);
  absl::Status CheckUnchanged(const Groups& groups) const;
  absl::Status TakeUpCaptured(CapturedState& captured, OptimizerStates& states);
  void CallConverted(Batch& batch, const FusedRun& run, int64_t step,
                     const torch::optim::OptimizerOptions& options);

  const std::unique_ptr<const FusedRule> rule_;
  std::vector<const void*> arranged_;  // parameters, null after each group
  std::vector<Batch> batches_;
  std::unordered_map<const void*, Place> places_;
  // Of the parameters, each once, in their order.
  std::vector<std::shared_ptr<OffloadSpace>> spaces_;
  // This one, as long as it lives.
  std::shared_ptr<const void> identity_ = std::make_shared<char>();
  // Empty between steps, with memory: runs after their first step, those in it,
  // and one that is stepped by itself.
  std::array<FusedLists, 2> lists_;
  bool rates_on_device_ = false;
  CapturedStep captured_;
  FusedLists single_;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_STEPPER_H_
