// The model of a Program: an embedding, units and a head.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_MODEL_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <vector>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

// Return the dtypes in which parameters are stored, and units compute.
c10::ScalarType StoredDtype(const Program& program);
c10::ScalarType ComputeDtype(const Program& program);

// The place of one forward: the model does other things in other places.
struct ProgramPlace {
  int step = 0;
  int micro = 0;
  int rank = 0;
};

// How a model is made from a program.
struct ModelKind {
  c10::ScalarType dtype;
  bool recomputes = false;  // regions are checkpointed
  bool forwards = false;    // units are called by fsdp::Forward()
};

// Where the user's code in a unit throws.
enum class ProgramFailure { kNone, kInForward, kInBackward };

// A unit's call depends on this besides its tensors. It is an argument, so that
// a repeated call does the same.
struct ProgramCall {
  ProgramPlace place;
  ProgramFailure failure = ProgramFailure::kNone;
};
template <typename Visit>
void VisitTensors(ProgramCall&, Visit) {}

class ProgramUnitModule : public torch::nn::Module {
 public:
  ProgramUnitModule(const ProgramUnit& unit, int dim, int index,
                    const ModelKind& kind, bool is_child);

  // Returns one output, or two if `unit` says so.
  std::vector<at::Tensor> forward(const at::Tensor& x, ProgramCall call);

  const ProgramCall& call() const { return call_; }
  void set_place(const ProgramPlace& place);
  void set_failure(ProgramFailure failure) { call_.failure = failure; }
  void set_offload(const std::shared_ptr<ActivationOffload>& offload);
  const ProgramUnit& unit() const { return unit_; }
  const std::shared_ptr<ProgramUnitModule>& child() const { return child_; }

  // The parameter that has ProgramUnit::hook.
  at::Tensor& hooked() { return fc_->weight; }

 private:
  at::Tensor Body(const at::Tensor& x, const ProgramCall& call);
  // Runs Body(), in a checkpointed region if the unit has one.
  at::Tensor Region(const at::Tensor& x, const ProgramCall& call);
  std::vector<at::Tensor> Outputs(const at::Tensor& x, const at::Tensor& y);
  void RegisterVectors(int dim, c10::ScalarType dtype);

  ProgramUnit unit_;
  const int index_;
  const ModelKind kind_;
  torch::nn::Linear fc_{nullptr}, out_{nullptr};
  torch::nn::LayerNorm layer_norm_{nullptr};
  torch::nn::BatchNorm1d batch_norm_{nullptr};
  at::Tensor scale_, unused_, sometimes_, empty_, second_, counter_;
  std::shared_ptr<ProgramUnitModule> child_;
  std::shared_ptr<ActivationOffload> offload_;
  ProgramCall call_;
};

class ProgramModel : public torch::nn::Module {
 public:
  // Parameters depend on `program` alone. Tied weights are not frozen here.
  ProgramModel(const Program& program, const ModelKind& kind);

  at::Tensor forward(const at::Tensor& x);

  void set_place(const ProgramPlace& place);
  void set_offload(const std::shared_ptr<ActivationOffload>& offload);
  const std::vector<std::shared_ptr<ProgramUnitModule>>& units() const {
    return units_;
  }
  const torch::nn::Linear& embedding() const { return embedding_; }
  const torch::nn::Linear& head() const { return head_; }

 private:
  // Backward may run regions again when units are in another place, so that
  // calls are copied.
  using Calls = std::vector<ProgramCall>;
  at::Tensor CallUnit(ProgramUnitModule& unit, const ProgramCall& call,
                      const at::Tensor& x) const;
  // Runs the units from number `first` on, in regions if there are any.
  at::Tensor RunUnits(const Calls& calls, size_t first,
                      const at::Tensor& x) const;
  template <typename Body>
  at::Tensor Region(const Body& body, const at::Tensor& x) const;

  const bool writes_input_;
  const int regions_;
  const ModelKind kind_;
  std::shared_ptr<ActivationOffload> offload_;
  torch::nn::Linear embedding_{nullptr}, head_{nullptr};
  std::vector<std::shared_ptr<ProgramUnitModule>> units_;
};

// Freezes one of the two tied weights if Program::tied says so.
void FreezeTied(const Program& program, ProgramModel& model);

// A hook on parameters that is not linear, so that it shows which gradient it
// sees.
at::Tensor ScaleByItsMaximum(const at::Tensor& gradient);

// Values of `micro` besides those of a step's own micro-batches.
enum { kEvalBatch = 9, kMeasureBatch = 8, kFailingBatch = 7 };

// Returns the data of a rank; all ranks have the same for kEvalBatch.
at::Tensor BatchOf(const Program& program, const ProgramPlace& place);
at::Tensor LossOf(const at::Tensor& output, const at::Tensor& batch, int micro);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_MODEL_H_
