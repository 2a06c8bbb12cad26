// Parameters with their gradients and optimizer states as torch's fused kernels
// like them best: neighbours in memory as one.
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

// Tensors of the parameter's size that a kernel keeps between steps.
inline constexpr int kMaxFusedSlots = 3;
using FusedSlots = std::array<at::Tensor, kMaxFusedSlots>;

// One parameter. All defined tensors are dense, with equal strides.
struct FusedSlice {
  at::Tensor parameter;
  at::Tensor gradient;  // undefined: to be left alone; may have another dtype
  FusedSlots slots;     // the first of them; of the parameter's dtype
  int64_t step = 0;     // slices of different steps are never merged
};

// Whether `tensor` begins in memory where `before`, which is dense, ends.
bool FollowsInMemory(const at::Tensor& before, const at::Tensor& tensor);

// What a kernel updates as one: 1-D and contiguous.
struct FusedRun {
  at::Tensor parameter;
  at::Tensor gradient;  // of its slices' dtype; defined from Begin() to End()
  FusedSlots slots;
  size_t slice;  // one of its slices, for step
};

// Merges slices that lie next to each other in memory, gradients and slots
// included, and whose steps are equal. What merged slices look like is cached;
// gradients, which come anew every step, are not kept.
//
// On the CPU, torch's kernels compute whole vectors in another way than the
// elements left over at the end of a tensor. So that results depend neither on
// what is merged nor on how parameters are cut into shards, the ends of runs
// are collected in memory of their own and updated as whole vectors, too.
class FusedRuns {
 public:
  // Runs that have to be converted are at most this long, so that conversion
  // needs little memory. They are those whose gradients have another dtype than
  // their parameters, or all.
  static constexpr int64_t kConvertedNumel = int64_t{1} << 20;

  // `slices` are of one device and dtype, in the order of their addresses, the
  // same ones in every call, and stay until End().
  void Begin(absl::Span<const FusedSlice> slices, int num_slots,
             bool convert_all);
  const std::vector<FusedRun>& runs() const { return runs_; }
  // After the kernels.
  void End();

 private:
  // How a slice takes part. While these stay, so do runs.
  struct Part {
    const void* parameter = nullptr;
    bool active = false;  // has elements and a gradient
    bool joins = false;   // the run of the active slice before it
    bool mixed = false;   // the gradient's dtype is another
    int step_class = 0;   // the same for equal steps
    bool operator==(const Part& other) const;
  };
  // The end of a run, in elements of the slice it ends in.
  struct Tail {
    size_t slice;
    int64_t begin;
    int64_t numel;
    int64_t staged;  // where it is in the staging memory
  };

  void ReadParts();
  bool Joins(const FusedSlice& before, const FusedSlice& slice) const;
  int StepClass(int64_t step);
  void Rebuild();
  void AddRun(size_t first, size_t last);
  void AddPiece(size_t slice, int64_t begin, int64_t numel);
  void Stage();
  void CopyIn();

  absl::Span<const FusedSlice> slices_;  // between Begin() and End()
  int num_slots_ = 0;
  bool convert_all_ = false;
  bool built_ = false;  // what is below is of parts_
  std::vector<Part> parts_;
  std::vector<Part> new_parts_;
  std::vector<int64_t> classes_;  // steps

  // The first `whole_` runs are views of slices, the others of staging_.
  std::vector<FusedRun> runs_;
  std::vector<int64_t> offsets_;  // of whole runs, from their slices
  size_t whole_ = 0;
  std::vector<Tail> tails_;
  // A row for parameters, one for gradients, one for each slot.
  at::Tensor staging_;
};

// What an optimizer tells so that FusedStepper steps it.

// Arguments of a kernel, an entry per run.
struct FusedLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::array<std::vector<at::Tensor>, kMaxFusedSlots> slots;
  std::vector<at::Tensor> steps;  // numbers in float, from 1 on
};

// States and options are of the optimizer's own classes.
class FusedRule {
 public:
  using Slots = std::array<at::Tensor*, kMaxFusedSlots>;

  virtual ~FusedRule() = default;

  // The dtype that the kernel has to be given for parameters of `dtype`: the
  // same unless it cannot take that.
  virtual at::ScalarType KernelDtype(at::ScalarType dtype,
                                     at::Device device) const = 0;
  // How many tensors of a state the kernel takes. Without any, no states.
  virtual int NumSlots(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> NewState()
      const = 0;
  // The tensors of a state; null where it has no more.
  virtual Slots SlotsOf(torch::optim::OptimizerParamState& state) const = 0;
  // The number of the step that comes: 1 after NewState().
  virtual int64_t NextStep(torch::optim::OptimizerParamState& state) const = 0;
  virtual void SetStep(torch::optim::OptimizerParamState& state,
                       int64_t step) const = 0;
  // `first`: the step of all runs is 1; otherwise that of none is. `rate`: one
  // element in float, in place of the options' learning rate; undefined: that.
  virtual void Call(const FusedLists& lists,
                    const torch::optim::OptimizerOptions& options, bool first,
                    const at::Tensor& rate) const = 0;
  // Whether nothing but learning rates differs.
  virtual bool SameButRates(const torch::optim::OptimizerOptions& a,
                            const torch::optim::OptimizerOptions& b) const = 0;
};

using OptimizerStates =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_RUNS_H_
