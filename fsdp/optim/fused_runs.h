// Merges parameters that are neighbours in memory, with their gradients and
// optimizer states, into long arguments of torch's fused kernels.
#ifndef FSDP_OPTIM_FUSED_RUNS_H_
#define FSDP_OPTIM_FUSED_RUNS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace fsdp {

// A slot is a tensor of the parameter's size that a kernel keeps between steps.
inline constexpr int kMaxFusedSlots = 3;
using FusedSlots = std::array<at::Tensor, kMaxFusedSlots>;

// One parameter. All defined tensors are dense, with equal strides.
struct FusedSlice {
  at::Tensor parameter;
  at::Tensor gradient;  // undefined: no step; may have another dtype
  FusedSlots slots;     // as many as the kernel takes; the parameter's dtype
  int64_t step = 0;     // slices of different steps are never merged
};

// Returns whether `tensor` begins in memory where `before`, which is dense,
// ends.
bool FollowsInMemory(const at::Tensor& before, const at::Tensor& tensor);

// A 1-D, contiguous piece of memory that a kernel updates as one.
struct FusedRun {
  at::Tensor parameter;
  at::Tensor gradient;  // of its slices' dtype; defined from Begin() to End()
  FusedSlots slots;
  size_t slice;  // one of its slices; tells the step
};

// Merges slices that lie next to each other in memory, gradients and slots
// included, and whose steps are equal. The runs are cached between steps,
// without gradients, which are new in every step.
//
// On the CPU, torch's kernels compute whole vectors in another way than the
// elements left over at the end of a tensor. So that results depend neither on
// merging nor on how parameters are cut into shards, the ends of runs are
// copied into staging memory and updated as whole vectors, too.
class FusedRuns {
 public:
  // The longest run that has to be converted, in elements, so that conversion
  // needs little memory. Runs are converted if their gradients have another
  // dtype than their parameters, or if `convert_all` is set.
  static constexpr int64_t kConvertedNumel = int64_t{1} << 20;

  // Merges `slices`, which are of one device and dtype, in the order of their
  // addresses, the same in every call, and valid until End().
  void Begin(absl::Span<const FusedSlice> slices, int num_slots,
             bool convert_all);
  const std::vector<FusedRun>& runs() const { return runs_; }
  // Copies the ends of runs back, after the kernels.
  void End();

 private:
  // How a slice takes part. Runs are cached as long as these are the same.
  struct Part {
    const void* parameter = nullptr;
    bool active = false;  // it has elements and a gradient
    bool joins = false;   // it continues the run of the active slice before it
    bool mixed = false;   // the gradient has another dtype
    int step_class = 0;   // the same for equal steps
    bool operator==(const Part& other) const;
  };
  // The end of a run, in elements counted from the slice where it begins.
  struct Tail {
    size_t slice;
    int64_t begin;
    int64_t numel;
    int64_t staged;  // where it is in the staging memory
  };

  bool Joins(const FusedSlice& before, const FusedSlice& slice) const;
  void Rebuild();
  void AddRun(size_t first, size_t last);
  void Stage();
  // Copies parameters and slots of tails to the staging memory, with gradients,
  // or back.
  void CopyTails(bool in);

  absl::Span<const FusedSlice> slices_;  // between Begin() and End()
  int num_slots_ = 0;
  bool convert_all_ = false;
  bool built_ = false;  // the members below belong to parts_
  std::vector<Part> parts_;
  std::vector<Part> new_parts_;
  std::vector<int64_t> classes_;  // steps

  // The first `whole_` runs are views of slices, the others of staging_.
  std::vector<FusedRun> runs_;
  std::vector<int64_t> offsets_;  // of whole runs, from their slices
  size_t whole_ = 0;
  std::vector<Tail> tails_;
  // It has a row for parameters, one for gradients, and one for each slot.
  at::Tensor staging_;
};

// The arguments of a kernel, with an entry per run.
struct FusedLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::array<std::vector<at::Tensor>, kMaxFusedSlots> slots;
  std::vector<at::Tensor> steps;  // numbers in float, from 1 on
};

// Tells FusedStepper how one kind of optimizer steps. States and options are of
// the optimizer's own classes.
class FusedRule {
 public:
  using Slots = std::array<at::Tensor*, kMaxFusedSlots>;

  virtual ~FusedRule() = default;

  // Returns the dtype in which the kernel steps parameters of `dtype` on
  // `device`: the same, unless it cannot take that.
  virtual at::ScalarType KernelDtype(at::ScalarType dtype,
                                     at::Device device) const = 0;
  // Returns how many slots the kernel takes. If 0, there are no states.
  virtual int NumSlots(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> NewState()
      const = 0;
  // Returns the slots of a state; null for those that it does not have.
  virtual Slots SlotsOf(torch::optim::OptimizerParamState& state) const = 0;
  // Returns the number of the next step: 1 after NewState().
  virtual int64_t NextStep(torch::optim::OptimizerParamState& state) const = 0;
  virtual void SetStep(torch::optim::OptimizerParamState& state,
                       int64_t step) const = 0;
  // Calls the kernel. If `first`, the step of all runs is 1, else of none.
  // `rate`, one element in float, replaces the options' learning rate if it is
  // defined.
  virtual void Call(const FusedLists& lists,
                    const torch::optim::OptimizerOptions& options, bool first,
                    const at::Tensor& rate) const = 0;
  // Returns whether `a` and `b` differ at most in the learning rate.
  virtual bool SameButRates(const torch::optim::OptimizerOptions& a,
                            const torch::optim::OptimizerOptions& b) const = 0;
};

using OptimizerStates =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_RUNS_H_
