#include "fsdp/testing/program/program_model.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "fsdp/model/forward.h"
#include "fsdp/recompute/checkpoint.h"

namespace fsdp::testing {
namespace {

constexpr int kRows = 3;

// Returns numbers of both signs, which differ for each `k`.
at::Tensor Numbers(at::IntArrayRef sizes, int k, c10::ScalarType dtype) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble)
      .mul(0.7 + 0.13 * k)
      .add(k)
      .sin()
      .mul(0.4)
      .view(sizes)
      .to(dtype);
}

torch::nn::Linear MakeLinear(int in, int out, bool bias, int k,
                             c10::ScalarType dtype) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  linear->to(dtype);
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(Numbers({out, in}, k, dtype));
  if (bias) linear->bias.copy_(Numbers({out}, k + 1, dtype));
  return linear;
}

// A function of the user's whose backward takes a defined gradient.
struct ScaleRows : torch::autograd::Function<ScaleRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& factors) {
    context->save_for_backward({x, factors});
    return x * factors;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

}  // namespace

c10::ScalarType StoredDtype(const Program& program) {
  return program.precision == kFloat ? at::kFloat : at::kDouble;
}

c10::ScalarType ComputeDtype(const Program& program) {
  switch (program.precision) {
    case kComputeFloat:
      return at::kFloat;
    case kComputeBFloat16:
      return at::kBFloat16;
    case kComputeHalf:
      return at::kHalf;
    default:
      return StoredDtype(program);
  }
}

ProgramUnitModule::ProgramUnitModule(const ProgramUnit& unit, int dim,
                                     int index, const ModelKind& kind,
                                     bool is_child)
    : unit_(unit), index_(index), kind_(kind) {
  const c10::ScalarType dtype = kind.dtype;
  const int k = 7 * index + (is_child ? 5 : 0);
  fc_ =
      register_module("fc", MakeLinear(dim, unit.hidden, unit.bias, k, dtype));
  out_ = register_module("out",
                         MakeLinear(unit.hidden, dim, unit.bias, k + 2, dtype));
  RegisterVectors(dim, dtype);
  if (unit.layer_norm) {
    const torch::nn::LayerNormOptions options({dim});
    layer_norm_ = register_module("layer_norm", torch::nn::LayerNorm(options));
    layer_norm_->to(dtype);
  }
  if (unit.batch_norm) {
    batch_norm_ = register_module("batch_norm", torch::nn::BatchNorm1d(dim));
    batch_norm_->to(dtype);
  }
  if (is_child) {
    unit_.outputs = kOneOutput;
    unit_.writes_input = 0;
  } else if (unit.child) {
    child_ = register_module("child", std::make_shared<ProgramUnitModule>(
                                          unit, dim, index, kind, true));
  }
  if (unit.frozen == kWeightFrozen) fc_->weight.set_requires_grad(false);
  if (unit.frozen != kAllFrozen) return;
  for (at::Tensor& parameter : parameters()) parameter.set_requires_grad(false);
}

void ProgramUnitModule::RegisterVectors(int dim, c10::ScalarType dtype) {
  if (unit_.scale) {
    scale_ = register_parameter("scale", at::full({}, 0.1, dtype));
  }
  if (unit_.unused) {
    unused_ = register_parameter("unused", Numbers({3}, index_, dtype));
  }
  if (unit_.sometimes) {
    sometimes_ = register_parameter("sometimes", Numbers({dim}, 3, dtype));
  }
  if (unit_.empty) {
    empty_ = register_parameter("empty", at::empty({0, dim}, dtype));
  }
  const int outputs = unit_.outputs;
  if (outputs == kUnusedOutput || outputs == kSometimesOutput ||
      outputs == kHookedOutput) {
    second_ = register_parameter("second", Numbers({dim}, 4, dtype));
  }
  if (unit_.counter) {
    counter_ = register_buffer("counter", at::zeros({2}, at::kDouble));
  }
}

at::Tensor ProgramUnitModule::Body(const at::Tensor& x,
                                   const ProgramCall& call) {
  at::Tensor y = x + out_->forward(fc_->forward(x).tanh());
  if (unit_.scale) y = y * (1 + scale_);
  const int sum = call.place.step + call.place.micro + call.place.rank + index_;
  if (unit_.sometimes && sum % 3 == 0) y = y + sometimes_ * 0.1;
  if (unit_.empty) y = y + empty_.sum();
  if (unit_.layer_norm) y = layer_norm_->forward(y);
  if (unit_.batch_norm) y = batch_norm_->forward(y);
  if (call.failure == ProgramFailure::kInForward) {
    throw std::runtime_error("the forward of the program fails");
  }
  if (call.failure == ProgramFailure::kInBackward && y.requires_grad()) {
    y.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("the backward of the program fails");
    });
  }
  return y;
}

at::Tensor ProgramUnitModule::Region(const at::Tensor& x,
                                     const ProgramCall& call) {
  if (!unit_.checkpoint || !kind_.recomputes) return Body(x, call);
  CheckpointOptions options;
  options.offload = offload_;
  const auto body = [this, call](const at::Tensor& x) { return Body(x, call); };
  return CheckpointWith(options, body, x);
}

std::vector<at::Tensor> ProgramUnitModule::forward(const at::Tensor& x,
                                                   ProgramCall call) {
  if (unit_.counter && is_training()) {
    const torch::NoGradGuard no_grad;
    counter_.add_(1);
  }
  if (unit_.writes_input) x.mul_(1.25);
  at::Tensor y = Region(x, call);
  if (child_) {
    // The child must not fail, too.
    call.failure = ProgramFailure::kNone;
    y = (kind_.forwards ? Forward(child_, y, call)
                        : child_->forward(y, call))[0];
  }
  return Outputs(x, y);
}

std::vector<at::Tensor> ProgramUnitModule::Outputs(const at::Tensor& x,
                                                   const at::Tensor& y) {
  switch (unit_.outputs) {
    case kUnusedOutput:
    case kSometimesOutput:
      return {y, ScaleRows::apply(x.tanh(), second_)};
    case kHookedOutput: {
      at::Tensor hooked = x.tanh() * second_;
      if (hooked.requires_grad()) {
        hooked.register_hook(
            [](const at::Tensor& gradient) { return gradient.clamp(-1, 1); });
      }
      return {y, hooked * 2};
    }
    case kViewOutput:
      return {y, y.narrow(1, 0, 1)};
    default:
      return {y};
  }
}

void ProgramUnitModule::set_place(const ProgramPlace& place) {
  call_.place = place;
}

void ProgramUnitModule::set_offload(
    const std::shared_ptr<ActivationOffload>& offload) {
  offload_ = offload;
  if (child_) child_->set_offload(offload);
}

ProgramModel::ProgramModel(const Program& program, const ModelKind& kind)
    : writes_input_(program.writes_input != 0),
      regions_(kind.recomputes ? program.regions : kNoRegions),
      kind_(kind) {
  const int dim = program.dim;
  const c10::ScalarType dtype = kind.dtype;
  if (!program.bare) {
    embedding_ =
        register_module("embedding", MakeLinear(dim, dim, true, 100, dtype));
  }
  for (int i = 0; i < program.num_units; ++i) {
    units_.push_back(register_module(
        absl::StrCat("unit", i),
        std::make_shared<ProgramUnitModule>(program.units[i], dim, i, kind,
                                            /*is_child=*/false)));
  }
  if (!program.bare) {
    head_ = register_module("head", MakeLinear(dim, dim, true, 200, dtype));
  }
}

at::Tensor ProgramModel::CallUnit(ProgramUnitModule& unit,
                                  const ProgramCall& call,
                                  const at::Tensor& x) const {
  const std::vector<at::Tensor> outputs =
      kind_.forwards ? Forward(unit, x, call) : unit.forward(x, call);
  at::Tensor y = outputs[0];
  switch (unit.unit().outputs) {
    case kSometimesOutput:
      if ((call.place.step + call.place.micro + call.place.rank) % 2 == 0) {
        y = y + outputs[1] * 0.1;
      }
      break;
    case kViewOutput:
      y.mul_(1.5);
      y = y + outputs[1].sum() * 0.01;
      break;
    case kWrittenOutput:
      y.mul_(1.5);
      break;
    default:
      break;
  }
  // Uses the input again, as the unit has left it.
  if (unit.unit().writes_input) y = y + x * 0.1;
  return y;
}

template <typename Body>
at::Tensor ProgramModel::Region(const Body& body, const at::Tensor& x) const {
  CheckpointOptions options;
  options.offload = offload_;
  return CheckpointWith(options, body, x);
}

at::Tensor ProgramModel::RunUnits(const Calls& calls, size_t first,
                                  const at::Tensor& x) const {
  if (first == units_.size()) return x;
  ProgramUnitModule& unit = *units_[first];
  const ProgramPlace& place = calls[first].place;
  const bool is_skipped = unit.unit().skipped_in == place.step + 1 ||
                          unit.unit().skipped_micro == place.micro + 1;
  const auto call = [this, &unit, call = calls[first]](const at::Tensor& x) {
    return CallUnit(unit, call, x);
  };
  at::Tensor y = x;
  for (int i = 0; i <= unit.unit().twice && !is_skipped; ++i) {
    y = regions_ == kEachUnit ? Region(call, y) : call(y);
  }
  const auto rest = [this, calls, first](const at::Tensor& y) {
    return RunUnits(calls, first + 1, y);
  };
  return regions_ == kNestedRegions ? Region(rest, y) : rest(y);
}

at::Tensor ProgramModel::forward(const at::Tensor& x) {
  if (writes_input_) x.mul_(1.25);
  at::Tensor y = embedding_.is_empty() ? x * 1 : embedding_->forward(x);
  Calls calls;
  for (const auto& unit : units_) calls.push_back(unit->call());
  const auto all = [this, calls](const at::Tensor& y) {
    return RunUnits(calls, 0, y);
  };
  y = regions_ == kAllUnits ? Region(all, y) : all(y);
  return head_.is_empty() ? y : head_->forward(y);
}

void ProgramModel::set_place(const ProgramPlace& place) {
  for (const auto& unit : units_) unit->set_place(place);
}

void ProgramModel::set_offload(
    const std::shared_ptr<ActivationOffload>& offload) {
  offload_ = offload;
  for (const auto& unit : units_) unit->set_offload(offload);
}

void FreezeTied(const Program& program, ProgramModel& model) {
  if (program.tied == kTiedHeadFrozen) {
    model.head()->weight.set_requires_grad(false);
  }
  if (program.tied == kTiedEmbeddingFrozen) {
    model.embedding()->weight.set_requires_grad(false);
  }
}

at::Tensor ScaleByItsMaximum(const at::Tensor& gradient) {
  return gradient * (1 + gradient.abs().max());
}

at::Tensor BatchOf(const Program& program, const ProgramPlace& place) {
  const int rank = place.micro == kEvalBatch ? kEvalBatch : place.rank;
  return at::arange(kRows * program.dim, at::kDouble)
      .add(17.3 * place.step + 5.1 * place.micro + 2.7 * rank)
      .mul(1.37)
      .sin()
      .view({kRows, program.dim})
      .to(StoredDtype(program));
}

at::Tensor LossOf(const at::Tensor& output, const at::Tensor& batch,
                  int micro) {
  const at::Tensor difference =
      output.to(batch.scalar_type()) - batch.detach().tanh();
  return difference.pow(2).mean() / micro;
}

}  // namespace fsdp::testing
