#include "fsdp/testing/program/sharded_program.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/mesh.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/forward.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/schedule/testing/choices.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/program/program_model.h"
#include "fsdp/testing/program/program_optimizers.h"
#include "fsdp/testing/program/sharded_run.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::testing {
namespace {

constexpr float kInitialScale = 1024;

absl::Status Different(absl::string_view text) {
  return absl::InternalError(absl::StrCat(kDiffers, text));
}

std::shared_ptr<ProgramModel> MakeModel(const Program& p) {
  std::optional<DeferredInit> deferred;
  if (p.deferred) {
    DeferredInitOptions options;
    options.min_bytes = p.salt % 2 ? 0 : 100;
    deferred.emplace(options);
  }
  ModelKind kind{StoredDtype(p)};
  kind.recomputes = true;
  kind.forwards = CallsByForward(p);
  return std::make_shared<ProgramModel>(p, kind);
}

void AddHooks(int kind, ProgramModel& model) {
  for (const auto& unit : model.units()) {
    if (unit->unit().hook != kind) continue;
    unit->hooked().register_hook(ScaleByItsMaximum);
  }
}

// Returns whether the tolerance is that of less than double precision.
bool IsCoarse(double tolerance) { return tolerance >= 1e-6; }

}  // namespace

ShardedRun::ShardedRun(const Program& program, const ProgramRecord& record,
                       comm::Communicator& world, const std::string& directory)
    : p_(program),
      record_(record),
      world_(world),
      directory_(directory),
      tolerance_(ToleranceOf(program)),
      delays_(static_cast<uint32_t>(program.salt * 7 + world.rank())) {}

void ShardedRun::MaybeDelay() {
  if (p_.late == 0) return;
  const bool is_late = p_.late == world_.rank() + 1;
  const bool now = delays_.Chance(is_late ? 60 : 5);
  if (!now) return;
  // On a busy machine, a yield takes as long as others have work.
  const absl::Time latest = absl::Now() + absl::Milliseconds(2);
  const int yields = static_cast<int>(std::pow(10, p_.yields));
  for (int i = 0; i < yields && absl::Now() < latest; ++i) {
    std::this_thread::yield();
  }
}

absl::Status ShardedRun::Differ(absl::string_view what, const at::Tensor& got,
                                const at::Tensor& expected) const {
  if (got.defined() != expected.defined()) {
    return Different(
        absl::StrCat(what, " is ", got.defined() ? "" : "not ", "there"));
  }
  if (!got.defined()) return absl::OkStatus();
  if (got.sizes() != expected.sizes()) {
    return Different(absl::StrCat(what, " has other sizes"));
  }
  const at::Tensor a = got.detach().to(at::kDouble);
  const at::Tensor b = expected.detach().to(at::kDouble);
  // The terms of a sum round as the largest of them does.
  const double largest =
      IsCoarse(tolerance_) && b.numel() > 0 ? b.abs().max().item<double>() : 0;
  if (at::allclose(a, b, tolerance_, tolerance_ * std::max(scale_, largest),
                   /*equal_nan=*/true)) {
    return absl::OkStatus();
  }
  return Different(absl::StrCat(what, " is off by ",
                                (a - b).abs().max().item<double>(), " of ",
                                b.abs().max().item<double>()));
}

absl::Status ShardedRun::Create() {
  const std::shared_ptr<ProgramModel> model = MakeModel(p_);
  if (p_.tied) {
    FSDP_RETURN_IF_ERROR(
        Tie(model->embedding()->weight, model->head()->weight));
  }
  FreezeTied(p_, *model);
  AddHooks(kHookBefore, *model);
  if (activations_ != nullptr) model->set_offload(activations_);
  Options options = OptionsOf(p_, directory_);
  options.recompute.options.offload = activations_;
  auto sharded = FullyShard(model, *mesh_, options);
  if (!sharded.ok()) {
    return absl::Status(sharded.status().code(),
                        absl::StrCat(kRefused, sharded.status().message()));
  }
  model_ = *std::move(sharded);
  AddHooks(kHookAfter, *model_.module());
  MakeOptimizersAnew();
  return p_.in_backward ? SetStepInBackward() : absl::OkStatus();
}

void ShardedRun::MakeOptimizersAnew() {
  NamedTensors shards;
  for (const TensorRange& shard : model_->Ranges()) {
    shards.emplace_back(shard.name, shard.values);
  }
  optimizers_ = MakeOptimizers(p_, /*sharded=*/true, shards);
}

absl::Status ShardedRun::SetStepInBackward() {
  return model_->StepInBackward([this](absl::Span<const TensorRange> unit) {
    MaybeDelay();
    for (const auto& step : optimizers_.unit_steps) {
      FSDP_RETURN_IF_ERROR(step(unit));
    }
    for (const TensorRange& shard : unit) {
      at::Tensor(shard.values).mutable_grad() = at::Tensor();
    }
    return absl::OkStatus();
  });
}

void ShardedRun::Zero() {
  const bool to_none = p_.zero % 2 == 0;
  if (p_.zero >= kOptimizersToNone) return optimizers_.ZeroGrad(to_none);
  model_->zero_grad(to_none);
}

absl::Status ShardedRun::LoseBackward(int step) {
  const NoSyncScope no_sync = model_->NoSync();
  const ProgramPlace place{step, kFailingBatch, world_.rank()};
  model_.module()->set_place(place);
  const at::Tensor batch = BatchOf(p_, place);
  const at::Tensor loss = LossOf(model_->forward(batch * 1), batch, 1);
  if (loss.requires_grad()) FSDP_RETURN_IF_ERROR(model_->Backward(loss));
  model_->zero_grad(p_.zero % 2 == 0);
  return absl::OkStatus();
}

// All ranks fail alike, and go on.
absl::Status ShardedRun::FailOnPurpose(int step, ProgramFailure failure) {
  ProgramUnitModule& unit = *model_.module()->units()[step % p_.num_units];
  unit.set_failure(failure);
  const ProgramPlace place{step, kFailingBatch, world_.rank()};
  model_.module()->set_place(place);
  const at::Tensor batch = BatchOf(p_, place);
  bool can_fail = unit.unit().skipped_in != step + 1;
  absl::Status backward;
  const absl::Status thrown = TorchToStatus("a failing step", [&] {
    const at::Tensor loss = LossOf(model_->forward(batch * 1), batch, 1);
    if (failure != ProgramFailure::kInBackward) return;
    can_fail = can_fail && loss.requires_grad();
    if (loss.requires_grad()) backward = model_->Backward(loss);
  });
  unit.set_failure(ProgramFailure::kNone);
  const bool failed = !thrown.ok() || !backward.ok();
  // A unit without anything trainable before it has no backward.
  if (failure == ProgramFailure::kInForward && can_fail && !failed) {
    return Different("a forward that throws returned");
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::StartStyle(int step) {
  switch (p_.steps[step].style) {
    case kLostBackward:
      return LoseBackward(step);
    case kFailedForward:
      FSDP_RETURN_IF_ERROR(FailOnPurpose(step, ProgramFailure::kInForward));
      break;
    case kFailedBackward:
      FSDP_RETURN_IF_ERROR(FailOnPurpose(step, ProgramFailure::kInBackward));
      break;
    default:
      return absl::OkStatus();
  }
  model_->zero_grad(p_.zero % 2 == 0);
  return absl::OkStatus();
}

absl::Status ShardedRun::ForwardMicro(const ProgramPlace& place, Micro* micro) {
  MaybeDelay();
  model_.module()->set_place(place);
  micro->leaf = BatchOf(p_, place);
  if (p_.input_grad) micro->leaf.set_requires_grad(true);
  at::Tensor loss =
      LossOf(model_->forward(micro->leaf * 1), micro->leaf, p_.micro);
  const double got = loss.item<double>();
  const auto& losses = record_.steps[place.step].losses[place.micro];
  const double expected = losses[place.rank];
  for (const double any : losses) scale_ = std::max(scale_, std::abs(any));
  const bool both_diverge =
      got == expected || (std::isnan(got) && std::isnan(expected));
  if (!both_diverge &&
      !(std::abs(got - expected) <= tolerance_ * (1 + std::abs(expected)))) {
    return Different(absl::StrCat("the loss of step ", place.step, ", micro ",
                                  place.micro, " is ", got, ", not ",
                                  expected));
  }
  if (p_.infinite_in == place.step + 1 && place.rank == 0 && place.micro == 0) {
    loss = loss * std::numeric_limits<double>::infinity();
  }
  micro->loss = scaler_ ? scaler_->Scale(loss) : loss;
  return absl::OkStatus();
}

absl::Status ShardedRun::BackwardMicro(const ProgramPlace& place,
                                       const Micro& micro) {
  const int style = p_.steps[place.step].style;
  if (!micro.loss.requires_grad()) return absl::OkStatus();
  MaybeDelay();
  if (style == kRetain) {
    std::optional<NoSyncScope> no_sync;
    if (p_.no_sync) no_sync.emplace(model_->NoSync());
    FSDP_RETURN_IF_ERROR(model_->Backward(micro.loss, /*retain_graph=*/true));
  }
  FSDP_RETURN_IF_ERROR(model_->Backward(micro.loss));
  if (style == kStateDictBetween) {
    FSDP_RETURN_IF_ERROR(model_->GatherStateDict().status());
  }
  if (style == kEvalBetween) {
    const torch::NoGradGuard no_grad;
    model_->eval();
    model_->forward(BatchOf(p_, place) * 1);
    model_->train();
  }
  return absl::OkStatus();
}

// Returns a scope if the n-th backward of a step is not reduced.
std::optional<NoSyncScope> ShardedRun::Keep(int n) {
  std::optional<NoSyncScope> no_sync;
  const bool keeps = p_.no_sync ? n + 1 < p_.micro : (p_.kept >> n & 1) != 0;
  if (keeps) no_sync.emplace(model_->NoSync());
  return no_sync;
}

absl::Status ShardedRun::BackwardAll(int step, std::vector<Micro>& waiting) {
  const int style = p_.steps[step].style;
  if (style == kOneLoss) {
    at::Tensor sum = waiting[0].loss;
    for (size_t i = 1; i < waiting.size(); ++i) sum = sum + waiting[i].loss;
    return sum.requires_grad() ? model_->Backward(sum) : absl::OkStatus();
  }
  for (size_t i = 0; i < waiting.size(); ++i) {
    const auto no_sync = Keep(static_cast<int>(i));
    const size_t index =
        style == kForwardsFirstReversed ? waiting.size() - 1 - i : i;
    FSDP_RETURN_IF_ERROR(BackwardMicro(
        {step, static_cast<int>(index), world_.rank()}, waiting[index]));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::MicroBatches(int step) {
  const int style = p_.steps[step].style;
  const bool forwards_first = style == kForwardsFirst ||
                              style == kForwardsFirstReversed ||
                              style == kOneLoss;
  std::vector<Micro> micros;
  for (int i = 0; i < p_.micro; ++i) {
    const ProgramPlace place{step, i, world_.rank()};
    const auto no_sync = Keep(i);
    FSDP_RETURN_IF_ERROR(ForwardMicro(place, &micros.emplace_back()));
    if (forwards_first) continue;
    FSDP_RETURN_IF_ERROR(BackwardMicro(place, micros.back()));
    if (i == 0 && style == kFailBetween) {
      FSDP_RETURN_IF_ERROR(FailOnPurpose(step, ProgramFailure::kInForward));
    }
  }
  if (forwards_first) FSDP_RETURN_IF_ERROR(BackwardAll(step, micros));
  return CompareInputs(step, micros);
}

absl::Status ShardedRun::CompareInputs(int step,
                                       const std::vector<Micro>& micros) {
  if (!p_.input_grad) return absl::OkStatus();
  for (size_t i = 0; i < micros.size(); ++i) {
    FSDP_RETURN_IF_ERROR(
        Differ(absl::StrCat("the gradient of input ", i, " of step ", step),
               micros[i].leaf.grad(),
               record_.steps[step].input_gradients[i][world_.rank()]));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::HalveGradients() {
  SummonOptions options;
  options.with_grads = true;
  FSDP_ASSIGN_OR_RETURN(auto scope, model_->SummonFullParams(options));
  const torch::NoGradGuard no_grad;
  std::set<const void*> seen;
  for (at::Tensor& parameter : model_.module()->parameters()) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    if (seen.insert(gradient.data_ptr()).second) at::Tensor(gradient).mul_(0.5);
  }
  return scope.Close();
}

absl::Status ShardedRun::UnscaleAndClip(int step) {
  if (scaler_ && (p_.clip || p_.halve_gradients || p_.two_optimizers)) {
    FSDP_RETURN_IF_ERROR(scaler_->Unscale(model_->Ranges()).status());
  }
  if (p_.halve_gradients) FSDP_RETURN_IF_ERROR(HalveGradients());
  if (!p_.clip) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const auto norm, model_->ClipGradNorm(0.05, p_.norm));
  const double got = norm.item<double>();
  const double expected = record_.steps[step].norm;
  if (!std::isfinite(expected) ||
      std::abs(got - expected) <= tolerance_ * (1 + expected)) {
    return absl::OkStatus();
  }
  return Different(
      absl::StrCat("the norm of step ", step, " is ", got, ", not ", expected));
}

absl::Status ShardedRun::Optimize(int step) {
  FSDP_RETURN_IF_ERROR(UnscaleAndClip(step));
  if (p_.in_backward) return absl::OkStatus();
  MaybeDelay();
  if (!scaler_) {
    optimizers_.Step();
    return absl::OkStatus();
  }
  for (const auto& optimizer : optimizers_.all) {
    FSDP_RETURN_IF_ERROR(scaler_->Step(*optimizer, model_->Ranges()).status());
  }
  FSDP_RETURN_IF_ERROR(scaler_->Update());
  if (scaler_->scale() == record_.steps[step].scale) return absl::OkStatus();
  return Different(
      absl::StrCat("the scale after step ", step, " is ", scaler_->scale()));
}

absl::Status ShardedRun::OptimizeAndHold(int step) {
  const ProgramStep& now = p_.steps[step];
  std::vector<torch::nn::Module*> held;
  std::vector<UnshardHandle> handles;
  for (int i = 0; i < p_.num_units; ++i) {
    if ((now.hold >> i & 1) == 0) continue;
    held.push_back(model_.module()->units()[i].get());
    MaybeDelay();
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(*held.back()));
    handles.push_back(std::move(handle));
  }
  const auto wait = [&handles]() -> absl::Status {
    for (UnshardHandle& handle : handles) FSDP_RETURN_IF_ERROR(handle.Wait());
    return absl::OkStatus();
  };
  if (now.hold_waits) FSDP_RETURN_IF_ERROR(wait());
  FSDP_RETURN_IF_ERROR(Optimize(step));
  if (!now.hold_waits) FSDP_RETURN_IF_ERROR(wait());
  if (now.hold_evals) FSDP_RETURN_IF_ERROR(Eval(step));
  for (torch::nn::Module* module : held) {
    FSDP_RETURN_IF_ERROR(Reshard(*module));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::Compare(int step) {
  const StepRecord& expected = record_.steps[step];
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model_->GatherStateDict());
  TensorMap got;
  for (const auto& item : dict) got[item.key()] = item.value();
  if (HasWholeOptimizerState(p_)) {
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                          model_->GatherOptimizerState(*optimizers_.all[0]));
    for (const auto& item : states.tensors) got[item.key()] = item.value();
  }
  for (const auto& [name, value] : expected.values) {
    const bool is_parameter = dict.contains(name);
    if (!is_parameter && !HasWholeOptimizerState(p_)) continue;
    FSDP_RETURN_IF_ERROR(
        Differ(absl::StrCat(name, " after step ", step), got[name], value));
  }
  for (const auto& item : model_.module()->named_buffers()) {
    FSDP_RETURN_IF_ERROR(
        Differ(absl::StrCat(item.key(), " after step ", step), item.value(),
               expected.buffers[world_.rank()].at(item.key())));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::Step(int step) {
  Zero();
  for (const int call : p_.steps[step].before) {
    std::optional<c10::InferenceMode> inference;
    if (p_.inference) inference.emplace();
    FSDP_RETURN_IF_ERROR(Call(step, call));
  }
  FSDP_RETURN_IF_ERROR(StartStyle(step));
  if (p_.new_rates) SetRates(step, optimizers_);
  FSDP_RETURN_IF_ERROR(MicroBatches(step));
  for (const int call : p_.steps[step].between) {
    FSDP_RETURN_IF_ERROR(Call(step, call));
  }
  FSDP_RETURN_IF_ERROR(OptimizeAndHold(step));
  const bool is_last = step + 1 == p_.num_steps;
  return p_.compare_each || is_last ? Compare(step) : absl::OkStatus();
}

absl::Status ShardedRun::Run() {
  FSDP_ASSIGN_OR_RETURN(mesh_, comm::Mesh::Create(Unowned(world_), MeshOf(p_)));
  if (p_.offload_activations) {
    ActivationOffloadOptions options;
    options.min_bytes = 0;
    options.window_bytes = p_.salt % 2 ? 64 : 4096;
    options.regions_ahead = p_.salt % 3;
    FSDP_ASSIGN_OR_RETURN(activations_,
                          ActivationOffload::MakeInHostMemory(
                              1 << 16, c10::Device(c10::kCPU), options));
  }
  FSDP_RETURN_IF_ERROR(Create());
  if (p_.scaler) {
    GradScalerOptions options;
    options.init_scale = kInitialScale;
    options.growth_interval = 2;
    FSDP_ASSIGN_OR_RETURN(scaler_, ShardedGradScaler::Create(world_, options));
  }
  for (int step = 0; step < p_.num_steps; ++step) {
    FSDP_RETURN_IF_ERROR(Step(step));
  }
  return absl::OkStatus();
}

absl::Status RunShardedProgram(const Program& program,
                               const ProgramRecord& record,
                               comm::Communicator& world,
                               const std::string& directory) {
  return ShardedRun(program, record, world, directory).Run();
}

}  // namespace fsdp::testing
