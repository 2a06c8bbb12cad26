#include "fsdp/capture/step_capture.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/resting/resting_places.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/runtime_common.h"

namespace fsdp {
namespace {

constexpr char kWhat[] = "the capture of a step";
constexpr int kLeastWarmUp = 3;

std::string SizesAndDtype(const at::Tensor& tensor) {
  return c10::str(tensor.sizes(), " of ", tensor.scalar_type());
}

const void* AddressOf(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

absl::Status Cannot(const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat("a step of this model cannot be captured: ", what));
}

absl::Status CheckGroup(const comm::Communicator* group) {
  if (group == nullptr || group->CanBeCaptured()) return absl::OkStatus();
  return Cannot(absl::StrCat(
      "operations of the group (", group->ToString(),
      ") are not of the device alone. Use NCCL for the device, and no log and "
      "no extension of quantised gathers"));
}

// FailedPrecondition names what of the model cannot be captured.
absl::Status CheckCapturable(const ShardedModel& model) {
  const Runtime& runtime = model.runtime();
  if (!HasStreams(runtime.device())) {
    return Cannot(absl::StrCat("it is on ", runtime.device().str(),
                               ", which computes at once. Replays save time "
                               "where a host queues work for a device"));
  }
  if (model.offload() != nullptr) {
    return Cannot(
        "Options::offload is set, and the host moves what rests elsewhere");
  }
  const RuntimeHooks& hooks = runtime.reducer().hooks();
  if (hooks.reduce_scatter || hooks.all_reduce) {
    return Cannot(
        "SetReductionHooks() was called, and what the host does in a hook "
        "would be done once");
  }
  FSDP_RETURN_IF_ERROR(CheckGroup(&runtime.communicator()));
  for (int unit = 0; unit < model.num_units(); ++unit) {
    const Placement& placement = runtime.placement(unit);
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.shard.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.replicate.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.part.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.quantized.get()));
    if (!model.recomputes(unit)) continue;
    if (model.recompute_options().offload != nullptr) {
      return Cannot(
          absl::StrCat("unit ", model.unit_name(unit),
                       " is recomputed from arguments that rest elsewhere "
                       "(recompute.options.offload), which the host moves"));
    }
    if (model.recompute_options().preserve_rng_state) {
      return Cannot(absl::StrCat(
          "unit ", model.unit_name(unit),
          " is recomputed with the same random numbers, for which the host "
          "reads the device's generator. Where it draws none, turn "
          "recompute.options.preserve_rng_state off"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CapturedStep>> CapturedStep::Make(
    ShardedModuleBase& model, torch::optim::Optimizer& optimizer, Step step,
    const CaptureOptions& options) {
  ShardedModel& sharded = model.sharded_model();
  FSDP_RETURN_IF_ERROR(CheckCapturable(sharded));
  auto* const capturable = dynamic_cast<CapturableOptimizer*>(&optimizer);
  if (capturable == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a step of this optimizer cannot be captured: it counts steps and "
        "reads learning rates on the host. Use ",
        kFusedOptimizers, " (fsdp/optim/fused_optimizer.h)"));
  }
  if (options.make_graph == nullptr || step == nullptr) {
    return absl::InvalidArgumentError(
        "CapturedStep needs a step and CaptureOptions::make_graph, "
        "MakeCudaGraph (base/device_graph.h) for a GPU");
  }
  if (options.warm_up_steps < kLeastWarmUp) {
    return absl::InvalidArgumentError(absl::StrCat(
        "CaptureOptions::warm_up_steps is ", options.warm_up_steps,
        ": the first step allocates, and two more are compared, so that it is "
        "at least ",
        kLeastWarmUp));
  }
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<DeviceGraph> graph,
                        options.make_graph(sharded.device()));
  capturable->KeepRatesOnDevice();
  return std::unique_ptr<CapturedStep>(new CapturedStep(
      sharded, *capturable, std::move(step), options, std::move(graph)));
}

CapturedStep::CapturedStep(ShardedModel& model, CapturableOptimizer& optimizer,
                           Step step, const CaptureOptions& options,
                           std::unique_ptr<DeviceGraph> graph)
    : model_(model),
      optimizer_(optimizer),
      step_(std::move(step)),
      options_(options),
      graph_(std::move(graph)),
      stream_(std::make_unique<SideStream>(model.device())) {}

// The current stream must follow the replays before their memory is freed.
CapturedStep::~CapturedStep() {
  TorchToStatus("ordering the end of a captured step", [this] {
    stream_->FollowCurrentStream();
  }).IgnoreError();
}

absl::StatusOr<at::Tensor> CapturedStep::Run(const Inputs& inputs) {
  FSDP_RETURN_IF_ERROR(
      TorchToStatus("running a captured step", [&]() -> absl::Status {
        FSDP_RETURN_IF_ERROR(failure_);
        absl::Status ready = PrepareStep();
        if (ready.ok()) ready = TakeInputs(inputs);
        const bool captures = !is_captured_ && steps_ >= options_.warm_up_steps;
        // Ranks capture together, so a rank whose call is refused tells the
        // others.
        if (captures) ready = Agree(ready);
        FSDP_RETURN_IF_ERROR(ready);
        if (!captures && !is_captured_) return WarmUp();
        if (captures) {
          failure_ = Capture();
          FSDP_RETURN_IF_ERROR(failure_);
        }
        return Replay();
      }));
  return result_;
}

absl::Status CapturedStep::Agree(const absl::Status& mine) {
  return comm::Agree(model_.communicator(), mine, kWhat,
                     absl::Now() + model_.timeout());
}

// Frees what is gathered. FailedPrecondition inside a forward, a backward or a
// scope of full parameters, or if NoSync() has left gradients.
absl::Status CapturedStep::PrepareStep() {
  FSDP_RETURN_IF_ERROR(model_.CheckIdle("CapturedStep::Run()"));
  FSDP_RETURN_IF_ERROR(model_.CheckBinding());
  model_.GiveUpStaleBackward();
  const Reducer& reducer = model_.runtime().reducer();
  bool any_gathered = false;
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    any_gathered |= model_.schedule().IsUnsharded(unit);
    if (!reducer.HasWholeGradients(unit) && !reducer.HasSums(unit)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "CapturedStep::Run() while unit ", model_.unit_name(unit),
        " has gradients that NoSync() or SetRequiresAllReduce() has left: "
        "reduce them, or drop them by zero_grad() of the model"));
  }
  return any_gathered ? model_.ReleaseUnsharded() : absl::OkStatus();
}

void CapturedStep::Recapture() {
  graph_->Reset();
  memory_.clear();
  is_captured_ = false;
  steps_ = 0;
  failure_ = absl::OkStatus();
}

absl::Status CapturedStep::TakeInputs(const Inputs& inputs) {
  const c10::NoGradGuard no_grad;
  const c10::Device device = model_.device();
  const bool is_first = !inputs_.has_value();
  Inputs own = inputs_.value_or(Inputs());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].layout() == at::kStrided) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("input ", i, " of a captured step is ",
                     inputs[i].defined() ? "sparse" : "undefined"));
  }
  if (!is_first && inputs.size() != own.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a captured step gets ", inputs.size(),
                     " inputs, and its first call had ", own.size()));
  }
  return TorchToStatus("copying the inputs of a captured step", [&] {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& input = inputs[i];
      if (is_first) {
        own.push_back(at::empty_like(input, input.options().device(device)));
      } else if (input.sizes() != own[i].sizes() ||
                 input.scalar_type() != own[i].scalar_type()) {
        ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
            "input ", i, " of a captured step is ", SizesAndDtype(input),
            ", and in its first call was ", SizesAndDtype(own[i]),
            ": what is captured has one size")));
      }
      own[i].copy_(input, /*non_blocking=*/true);
    }
    inputs_ = std::move(own);
  });
}

// Runs on the stream that will be captured, so that everything that is set up
// per stream exists.
absl::Status CapturedStep::WarmUp() {
  before_last_ = std::exchange(last_, {});
  // Steps that begin so and do the same use the same buffers.
  model_.runtime_->BeginAlike();
  model_.runtime_->SetStepLog(&last_);
  gradients_ = Gradients();
  stream_->FollowCurrentStream();
  absl::Status status;
  {
    const SideStream::Scope scope(*stream_);
    status = CallStep();
  }
  stream_->BlockCurrentStream();
  model_.runtime_->SetStepLog(nullptr);
  // Two steps are compared, which must follow each other.
  steps_ = status.ok() ? steps_ + 1 : 0;
  return status;
}

absl::Status CapturedStep::CallStep() {
  return TorchToStatus("a step", [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor result, step_(*inputs_));
    if (!result.defined()) return absl::OkStatus();
    const c10::NoGradGuard no_grad;
    if (!result_.defined()) result_ = at::empty_like(result.detach());
    result_.copy_(result.detach());
    return absl::OkStatus();
  });
}

std::vector<const void*> CapturedStep::Gradients() const {
  std::vector<const void*> gradients;
  for (const TensorRange& named : model_.Ranges()) {
    gradients.push_back(AddressOf(named.values.grad()));
  }
  return gradients;
}

// While these exist, nothing else lies at their addresses.
std::vector<at::Tensor> CapturedStep::Buffers() const {
  std::vector<at::Tensor> buffers;
  for (const CastBuffer& buffer : model_.precision().buffers()) {
    if (!buffer.tensor.has_storage()) continue;  // sparse
    buffers.push_back(buffer.tensor.detach());
  }
  return buffers;
}

// Returns what calls between steps have set for the next steps' reductions.
std::vector<double> CapturedStep::Settings() const {
  const GradientScaling scaling = model_.runtime().reducer().scaling();
  std::vector<double> settings = {model_.synchronizes() ? 1.0 : 0.0,
                                  scaling.before, scaling.after};
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    settings.push_back(model_.schedule().synchronizes(unit) ? 1 : 0);
    settings.push_back(model_.schedule().all_reduces(unit) ? 1 : 0);
  }
  return settings;
}

// The captured step must end with the gradients with which a replay begins.
absl::Status CapturedStep::CheckGradients() const {
  const std::vector<const void*> now = Gradients();
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i] == gradients_[i]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradient of ", model_.Ranges()[i].name,
        now[i] == nullptr          ? " is gone, which was there"
        : gradients_[i] == nullptr ? " is there, which was not"
                                   : " lies elsewhere than",
        " when a step was captured: end every step by zero_grad(), or none"));
  }
  return absl::OkStatus();
}

absl::Status CapturedStep::CheckAlike() const {
  const std::string difference = DifferenceOf(
      before_last_, last_, [this](int unit) { return model_.unit_name(unit); });
  if (difference.empty()) return CheckGradients();
  return absl::FailedPreconditionError(absl::StrCat(
      "steps are not alike, so that none stands for the others. ", difference));
}

absl::Status CapturedStep::AwaitDevice() {
  DeviceEvent reached;
  bool is_reached = false;
  FSDP_RETURN_IF_ERROR(TorchToStatus("waiting for the device", [&] {
    model_.runtime_->JoinStreams();
    stream_->FollowCurrentStream();
    const SideStream::Scope scope(*stream_);
    reached.Record(model_.device());
    is_reached = reached.Wait(absl::Now() + model_.timeout());
  }));
  if (is_reached) return absl::OkStatus();
  return absl::DeadlineExceededError(
      "the device has not done the steps before the capture at the deadline");
}

// All ranks capture or none does: NCCL may register memory across ranks while
// its operations are captured.
absl::Status CapturedStep::Capture() {
  absl::Status status = CheckCapturable(model_);
  if (status.ok()) status = model_.order_check_.Finish();
  if (status.ok()) status = CheckAlike();
  if (status.ok()) status = AwaitDevice();
  FSDP_RETURN_IF_ERROR(Annotate(Agree(status), kWhat));
  status = CaptureHere();
  // The current stream waits for what the captured stream did around the
  // capture.
  status.Update(TorchToStatus(kWhat, [&] { stream_->BlockCurrentStream(); }));
  const absl::Status agreed = Agree(status);
  if (!agreed.ok()) {
    graph_->Reset();
    return Annotate(agreed, kWhat);
  }
  // Holds the memory and shards of the step, which a model that is given up
  // could free.
  memory_ = model_.runtime().StepMemory();
  shards_.clear();
  for (const TensorRange& named : model_.Ranges()) {
    shards_.push_back(
        {named.values, AddressOf(named.values), named.values.requires_grad()});
  }
  buffers_ = Buffers();
  settings_ = Settings();
  is_captured_ = true;
  return absl::OkStatus();
}

// The device has done all that it was given. While the model captures, a
// failure aborts nothing, because nothing has been sent.
absl::Status CapturedStep::CaptureHere() {
  FSDP_RETURN_IF_ERROR(PrepareStep());
  Runtime& runtime = *model_.runtime_;
  runtime.BeginAlike();
  runtime.ForgetEarlierSteps();
  model_.captures_ = true;
  const SideStream::Scope scope(*stream_);
  const absl::StatusOr<int64_t> capture = optimizer_.BeginCapture();
  absl::Status status = capture.status();
  if (status.ok()) optimizer_capture_ = *capture;
  if (status.ok()) status = graph_->BeginCapture();
  if (status.ok()) {
    status = TorchToStatus(kWhat, [&]() -> absl::Status {
      runtime.ForkStreams();
      FSDP_RETURN_IF_ERROR(CallStep());
      runtime.JoinStreams();
      return absl::OkStatus();
    });
  }
  if (status.ok()) status = graph_->EndCapture();
  optimizer_.EndCapture();
  // Work in flight is waited for in the capture to which it belongs.
  if (!status.ok()) {
    model_.GiveUpIteration(absl::OkStatus(), ShardedModel::InFlight::kDrop);
  }
  runtime.ForgetEarlierSteps();
  runtime.BeginAlike();
  model_.captures_ = false;
  if (status.ok()) status = CheckGradients();
  if (status.ok()) return status;
  graph_->Reset();
  // Drops gradients that the captured step has made: nothing has computed them.
  const std::vector<TensorRange>& shards = model_.Ranges();
  for (size_t i = 0; i < shards.size(); ++i) {
    at::Tensor& gradient = shards[i].values.mutable_grad();
    if (AddressOf(gradient) != gradients_[i]) gradient.reset();
  }
  return status;
}

absl::Status CapturedStep::CheckPlaces() const {
  FSDP_RETURN_IF_ERROR(CheckCapturable(model_));
  const std::vector<TensorRange>& shards = model_.Ranges();
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Pinned& then = shards_[i];
    const at::Tensor& now = shards[i].values;
    if (AddressOf(now) != then.address) {
      return absl::FailedPreconditionError(
          absl::StrCat("the shard of ", shards[i].name,
                       " lies elsewhere than when a step was captured"));
    }
    if (now.requires_grad() != then.requires_grad) {
      return absl::FailedPreconditionError(absl::StrCat(
          shards[i].name, " is ", then.requires_grad ? "frozen" : "trainable",
          " and was not when a step was captured"));
    }
  }
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) {
    return AddressOf(a) == AddressOf(b) && a.dtype() == b.dtype();
  };
  if (!absl::c_equal(Buffers(), buffers_, is_same)) {
    return absl::FailedPreconditionError(
        "a buffer lies elsewhere than when a step was captured, as after an "
        "evaluation with full_precision_in_eval and buffer_dtype");
  }
  if (Settings() != settings_) {
    return absl::FailedPreconditionError(
        "NoSync(), SetRequiresGradientSync(), SetRequiresAllReduce() or "
        "SetGradientDivideFactors() says something else than when a step was "
        "captured");
  }
  return CheckGradients();
}

absl::Status CapturedStep::Replay() {
  const absl::Status unchanged = CheckPlaces();
  absl::Status status =
      unchanged.ok() ? optimizer_.PrepareReplay(optimizer_capture_) : unchanged;
  if (!status.ok()) {
    return Annotate(status,
                    "replaying a captured step, which Recapture() "
                    "would capture again");
  }
  FSDP_RETURN_IF_ERROR(graph_->Replay());
  optimizer_.CountReplay();
  // LibTorch has not seen the writes.
  for (const TensorRange& named : model_.Ranges()) {
    named.values.unsafeGetTensorImpl()->bump_version();
  }
  ++replays_;
  return absl::OkStatus();
}

}  // namespace fsdp
