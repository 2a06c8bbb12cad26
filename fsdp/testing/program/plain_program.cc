#include "fsdp/testing/program/plain_program.h"

#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "fsdp/testing/program/program_model.h"
#include "fsdp/testing/program/program_optimizers.h"

namespace fsdp::testing {
namespace {

class PlainRun {
 public:
  explicit PlainRun(const Program& program);

  ProgramRecord Run();

 private:
  struct Snapshot {
    TensorMap values;
    std::vector<TensorMap> buffers;
    std::vector<std::string> optimizers;
  };

  // The parameter that holds the value of `name`.
  static std::string Owner(const Program& program, const std::string& name) {
    return program.tied && name == "head.weight" ? "embedding.weight" : name;
  }

  // Gives the model the values with which `rank` computes, and takes its
  // buffers back.
  void Load(int rank);
  void TakeBuffers(int rank);
  at::Tensor Forward(const ProgramPlace& place, const at::Tensor& input);

  void Zero();
  void ClearGradients();
  void Harvest();
  void Before(int step);
  void Call(int step, int call);
  void Eval(int step);
  void Measure(int step);
  void LoseForward(int step);
  void Scale(double factor);
  void Restore();
  void StartStyle(int step);
  void RunFailing(int step, bool backward);
  void MicroBatches(int step);
  void MicroBatch(const ProgramPlace& place);
  void Optimize(int step);
  void Pin(int step);
  void Note(StepRecord& record);
  std::vector<std::string> SaveOptimizers() const;
  void LoadOptimizers(const std::vector<std::string>& saved);

  const Program p_;
  const std::shared_ptr<ProgramModel> model_;
  NamedTensors values_;  // stored, leaves
  std::map<std::string, at::Tensor> by_name_;
  std::map<std::string, bool> trainable_;  // at first
  TensorMap pinned_;                       // the values of unsharded parameters
  std::vector<TensorMap> buffers_;
  ProgramOptimizers optimizers_;
  float scale_;
  int good_steps_ = 0;  // since the scale has changed
  Snapshot snapshot_;
  ProgramRecord record_;
};

TensorMap BuffersOf(const torch::nn::Module& module) {
  TensorMap buffers;
  for (const auto& item : module.named_buffers()) {
    buffers[item.key()] = item.value().clone();
  }
  return buffers;
}

TensorMap CloneOf(const NamedTensors& tensors) {
  TensorMap clones;
  for (const auto& [name, tensor] : tensors) {
    clones[name] = tensor.detach().clone();
  }
  return clones;
}

PlainRun::PlainRun(const Program& program)
    : p_(program),
      model_(std::make_shared<ProgramModel>(program,
                                            ModelKind{ComputeDtype(program)})),
      scale_(program.scaler ? 1024 : 1) {
  FreezeTied(p_, *model_);
  const ProgramModel stored(p_, ModelKind{StoredDtype(p_)});
  for (const auto& item : stored.named_parameters()) {
    if (Owner(p_, item.key()) != item.key()) continue;
    values_.emplace_back(item.key(),
                         item.value().detach().clone().requires_grad_());
    by_name_[item.key()] = values_.back().second;
  }
  for (const auto& item : model_->named_parameters()) {
    trainable_[item.key()] = item.value().requires_grad();
  }
  buffers_.assign(p_.ranks, BuffersOf(*model_));
  optimizers_ = MakeOptimizers(p_, /*sharded=*/false, values_);
  for (const auto& unit : model_->units()) {
    if (unit->unit().hook) unit->hooked().register_hook(ScaleByItsMaximum);
  }
}

void PlainRun::Load(int rank) {
  const torch::NoGradGuard no_grad;
  for (auto& item : model_->named_parameters()) {
    const auto pin = pinned_.find(item.key());
    item.value().copy_(pin != pinned_.end() ? pin->second
                                            : by_name_[Owner(p_, item.key())]);
  }
  for (auto& item : model_->named_buffers()) {
    item.value().copy_(buffers_[rank][item.key()]);
  }
}

void PlainRun::TakeBuffers(int rank) { buffers_[rank] = BuffersOf(*model_); }

at::Tensor PlainRun::Forward(const ProgramPlace& place,
                             const at::Tensor& input) {
  Load(place.rank);
  model_->set_place(place);
  at::Tensor output = model_->forward(input.to(ComputeDtype(p_)));
  TakeBuffers(place.rank);
  return output;
}

void PlainRun::Zero() {
  const bool to_none = p_.zero % 2 == 0;
  if (p_.zero >= kOptimizersToNone) return optimizers_.ZeroGrad(to_none);
  for (auto& [name, value] : values_) {
    if (to_none) {
      value.mutable_grad() = at::Tensor();
    } else if (value.grad().defined()) {
      value.mutable_grad().detach_().zero_();
    }
  }
}

void PlainRun::ClearGradients() {
  for (at::Tensor& parameter : model_->parameters()) {
    parameter.mutable_grad() = at::Tensor();
  }
}

// Adds the gradients of one backward.
void PlainRun::Harvest() {
  const torch::NoGradGuard no_grad;
  for (const auto& item : model_->named_parameters()) {
    if (!item.value().grad().defined()) continue;
    at::Tensor& value = by_name_[Owner(p_, item.key())];
    const at::Tensor part =
        item.value().grad().to(value.scalar_type()) / DivisorOf(p_);
    at::Tensor& sum = value.mutable_grad();
    sum = sum.defined() ? sum + part : part;
  }
}

void PlainRun::Eval(int step) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  std::vector<at::Tensor>& outputs = record_.outputs.emplace_back();
  for (int rank = 0; rank < p_.ranks; ++rank) {
    const ProgramPlace place{step, kEvalBatch, rank};
    outputs.push_back(Forward(place, BatchOf(p_, place).clone()).clone());
  }
  model_->train();
}

void PlainRun::Measure(int step) {
  std::vector<at::Tensor>& outputs = record_.outputs.emplace_back();
  for (int rank = 0; rank < p_.ranks; ++rank) {
    const ProgramPlace place{step, kMeasureBatch, rank};
    outputs.push_back(Forward(place, BatchOf(p_, place) * 1).detach().clone());
  }
}

void PlainRun::LoseForward(int step) {
  const torch::NoGradGuard no_grad;
  for (int rank = 0; rank < p_.ranks; ++rank) {
    const ProgramPlace place{step, kMeasureBatch, rank};
    Forward(place, BatchOf(p_, place).clone());
  }
}

void PlainRun::Scale(double factor) {
  const torch::NoGradGuard no_grad;
  for (auto& [name, value] : values_) value.mul_(factor);
}

std::vector<std::string> PlainRun::SaveOptimizers() const {
  std::vector<std::string> saved;
  for (const auto& optimizer : optimizers_.all) {
    torch::serialize::OutputArchive archive;
    optimizer->save(archive);
    std::ostringstream out;
    archive.save_to(out);
    saved.push_back(out.str());
  }
  return saved;
}

void PlainRun::LoadOptimizers(const std::vector<std::string>& saved) {
  optimizers_ = MakeOptimizers(p_, /*sharded=*/false, values_);
  for (size_t i = 0; i < saved.size(); ++i) {
    std::istringstream in(saved[i]);
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    optimizers_.all[i]->load(archive);
  }
}

void PlainRun::Restore() {
  if (snapshot_.values.empty()) return;
  const torch::NoGradGuard no_grad;
  for (auto& [name, value] : values_) value.copy_(snapshot_.values[name]);
  buffers_ = snapshot_.buffers;
  if (HasWholeOptimizerState(p_)) LoadOptimizers(snapshot_.optimizers);
}

void PlainRun::Call(int step, int call) {
  switch (call) {
    case kEval:
    case kInferenceEval:
      return Eval(step);
    case kMeasure:
      return Measure(step);
    case kLostForward:
      return LoseForward(step);
    case kSave:
      record_.saved.push_back(CloneOf(values_));
      return;
    case kLoad:
      for (int rank = 0; rank < p_.ranks; ++rank) {
        // With rank0_only, all ranks get the buffers of rank 0.
        if (p_.salt % 3 == 0) buffers_[rank] = buffers_[0];
      }
      for (TensorMap& buffers : buffers_) {
        for (auto& [name, buffer] : buffers) buffer = buffer + 1;
      }
      return Scale(0.95);
    case kSummon:
    case kWriteShards:
      return Scale(0.95);
    case kVisit: {
      const torch::NoGradGuard no_grad;
      for (auto& [name, value] : values_) value.add_(0.01);
      return;
    }
    case kSnapshot:
      snapshot_ = {CloneOf(values_), buffers_, SaveOptimizers()};
      return;
    case kRestore:
      return Restore();
    case kToggle: {
      const std::string name = ToggledName(p_, step);
      at::Tensor parameter = model_->named_parameters()[name];
      parameter.set_requires_grad(!parameter.requires_grad());
      by_name_[name].mutable_grad() = at::Tensor();
      return;
    }
    case kRestart:
      for (auto& item : model_->named_parameters()) {
        item.value().set_requires_grad(trainable_[item.key()]);
      }
      for (auto& [name, value] : values_) value.mutable_grad() = at::Tensor();
      return;
    default:
      return;
  }
}

// Fails alike on all ranks; only buffers show it.
void PlainRun::RunFailing(int step, bool backward) {
  ProgramUnitModule& unit = *model_->units()[step % p_.num_units];
  if (!backward) unit.set_failure(ProgramFailure::kInForward);
  for (int rank = 0; rank < p_.ranks; ++rank) {
    const ProgramPlace place{step, kFailingBatch, rank};
    try {
      Forward(place, BatchOf(p_, place) * 1);
    } catch (const std::runtime_error&) {
      TakeBuffers(rank);
    }
  }
  unit.set_failure(ProgramFailure::kNone);
}

void PlainRun::StartStyle(int step) {
  switch (p_.steps[step].style) {
    case kLostBackward:
    case kFailedBackward:
      return RunFailing(step, /*backward=*/true);
    case kFailedForward:
      return RunFailing(step, /*backward=*/false);
    default:
      return;
  }
}

void PlainRun::MicroBatch(const ProgramPlace& place) {
  StepRecord& record = record_.steps.back();
  at::Tensor leaf = BatchOf(p_, place);
  if (p_.input_grad) leaf.set_requires_grad(true);
  at::Tensor loss = LossOf(Forward(place, leaf * 1), leaf, p_.micro);
  record.losses[place.micro].push_back(loss.item<double>());
  if (p_.infinite_in == place.step + 1 && place.rank == 0 && place.micro == 0) {
    loss = loss * std::numeric_limits<double>::infinity();
  }
  loss = loss * scale_;
  const bool twice = p_.steps[place.step].style == kRetain;
  for (int i = 0; i <= (twice ? 1 : 0) && loss.requires_grad(); ++i) {
    ClearGradients();
    loss.backward({}, /*retain_graph=*/twice && i == 0);
    Harvest();
  }
  record.input_gradients[place.micro].push_back(leaf.grad());
}

void PlainRun::MicroBatches(int step) {
  StepRecord& record = record_.steps.back();
  record.losses.resize(p_.micro);
  record.input_gradients.resize(p_.micro);
  for (int micro = 0; micro < p_.micro; ++micro) {
    for (int rank = 0; rank < p_.ranks; ++rank) {
      MicroBatch({step, micro, rank});
    }
    if (micro == 0 && p_.steps[step].style == kFailBetween) {
      RunFailing(step, /*backward=*/false);
    }
  }
}

void PlainRun::Optimize(int step) {
  StepRecord& record = record_.steps.back();
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> with_gradient;
  bool infinite = false;
  for (auto& [name, value] : values_) {
    if (!value.grad().defined()) continue;
    with_gradient.push_back(value);
    infinite |= !at::isfinite(value.grad()).all().item<bool>();
    value.mutable_grad().div_(scale_);
    if (p_.halve_gradients) value.mutable_grad().mul_(0.5);
  }
  if (p_.clip && !with_gradient.empty()) {
    record.norm = torch::nn::utils::clip_grad_norm_(
        with_gradient, 0.05, static_cast<double>(p_.norm));
  }
  if (p_.new_rates) SetRates(step, optimizers_);
  if (!p_.scaler || !infinite) optimizers_.Step();
  if (p_.scaler) {
    good_steps_ = infinite ? 0 : good_steps_ + 1;
    if (infinite) scale_ *= 0.5F;
    if (good_steps_ == 2) {
      scale_ *= 2;
      good_steps_ = 0;
    }
  }
  if (!p_.in_backward) return;
  for (auto& [name, value] : values_) value.mutable_grad() = at::Tensor();
}

// Returns whether unsharded parameters are the shard itself: the unit must be
// alone in its group, compute in the stored dtype and rest in memory.
bool ShowsItsShard(const Program& p, int index) {
  const int strategy = StrategyOf(p, p.units[index]);
  const int group = strategy == 3   ? 1
                    : strategy >= 4 ? p.ranks / CountOf(p.rows, p.ranks)
                                    : p.ranks;
  return group == 1 && ComputeDtype(p) == StoredDtype(p) && !p.rest_parameters;
}

void PlainRun::Pin(int step) {
  for (int i = 0; i < p_.num_units; ++i) {
    if ((p_.steps[step].hold >> i & 1) == 0 || ShowsItsShard(p_, i)) continue;
    const std::string prefix = absl::StrCat("unit", i, ".");
    for (const auto& [name, value] : values_) {
      if (!absl::StartsWith(name, prefix)) continue;
      if (absl::StartsWith(name, absl::StrCat(prefix, "child."))) continue;
      pinned_[name] = value.detach().clone();
    }
  }
}

void PlainRun::Note(StepRecord& record) {
  record.values = CloneOf(values_);
  record.buffers = buffers_;
  record.scale = scale_;
  for (const auto& [name, value] : values_) {
    for (const auto& optimizer : optimizers_.all) {
      const auto found = optimizer->state().find(value.unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      for (const auto& [key, tensor] : StateTensors(*found->second)) {
        record.values[absl::StrCat(name, ".", key)] = tensor.detach().clone();
      }
    }
  }
}

ProgramRecord PlainRun::Run() {
  for (int i = 0; i < p_.num_steps; ++i) {
    const ProgramStep& step = p_.steps[i];
    record_.steps.emplace_back();
    Zero();
    for (const int call : step.before) Call(i, call);
    StartStyle(i);
    MicroBatches(i);
    for (const int call : step.between) Call(i, call);
    Pin(i);
    Optimize(i);
    if (step.hold_evals) Eval(i);
    pinned_.clear();
    Note(record_.steps.back());
  }
  return std::move(record_);
}

}  // namespace

ProgramRecord RunPlainProgram(const Program& program) {
  return PlainRun(program).Run();
}

bool HasWholeOptimizerState(const Program& program) {
  return !program.two_optimizers && !program.omits;
}

std::string ToggledName(const Program& program, int step) {
  return absl::StrCat("unit", step % program.num_units, ".out.weight");
}

double DivisorOf(const Program& program) {
  return program.divide == 1 ? 1 : program.divide == 2 ? 3 : program.ranks;
}

}  // namespace fsdp::testing
