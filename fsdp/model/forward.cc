#include "fsdp/model/forward.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

std::string Describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " on ",
                  tensor.device());
}

}  // namespace

struct ForwardScope::State {
  explicit State(UnitHandle of) : handle(std::move(of)) {}

  ShardedModel& model() const { return *handle.model; }
  int unit() const { return handle.unit; }

  const UnitHandle handle;
  std::optional<UnitScope> scope;
  bool watches_inputs = false;
  SeenTensors inputs;
  absl::Status thrown;
  bool finished = false;
};

ForwardScope::ForwardScope(const torch::nn::Module& module) {
  std::optional<UnitHandle> handle = FindUnit(module);
  if (!handle.has_value()) return;
  state_ = std::make_unique<State>(*std::move(handle));
  // If this throws, the destructor does not run, but PreForward() has cleaned
  // up.
  ThrowIfError(state_->model().PreForward(state_->unit()));
  const auto& running = state_->model().running_unit(state_->unit());
  if (running != nullptr) state_->scope.emplace(running);
  state_->watches_inputs = c10::GradMode::is_enabled();
}

ForwardScope::~ForwardScope() {
  if (state_ == nullptr || state_->finished) return;
  state_->model().AbandonForward(state_->unit(), state_->thrown);
}

bool ForwardScope::casts_inputs() const {
  return state_->model().precision().CastsInputs(state_->unit());
}

void ForwardScope::CastInputs(const std::vector<at::Tensor*>& inputs) {
  state_->model().precision().CastInputs(state_->unit(), inputs);
}

bool ForwardScope::watches_inputs() const { return state_->watches_inputs; }

void ForwardScope::WatchInput(const at::Tensor& input) {
  state_->inputs.Add(input);
  state_->model().WatchInput(state_->unit(), input);
}

void ForwardScope::OnException() {
  if (state_ == nullptr) return;
  ThrowIfError(state_->model().TakeFailure());
  state_->thrown = TorchToStatus("forward", [this] {
    try {
      throw;
    } catch (c10::Error& error) {
      // Only the innermost unit adds its name.
      if (error.context().empty()) {
        error.add_context(
            absl::StrCat("in the forward of unit ",
                         state_->model().unit_name(state_->unit())));
      }
      throw;
    }
  });
}

void RecomputedUnit::Refuse(const std::string& why) const {
  throw StatusError(absl::FailedPreconditionError(absl::StrCat(
      "the forward of unit ", name,
      " cannot be run again in backward, as Options::recompute.units asks: ",
      why, ", or leave the unit out of Options::recompute.units")));
}

std::optional<RecomputedUnit> FindRecomputed(const torch::nn::Module& module) {
  if (!c10::GradMode::is_enabled()) return std::nullopt;
  const std::optional<UnitHandle> handle = FindUnit(module);
  if (!handle.has_value() || !handle->model->recomputes(handle->unit)) {
    return std::nullopt;
  }
  RecomputedUnit unit{handle->model->unit_name(handle->unit),
                      handle->model->recompute_options()};
  // The module is shared, because its parent has it. The region keeps it alive.
  unit.options.modules.push_back(
      std::const_pointer_cast<torch::nn::Module>(module.shared_from_this()));
  return unit;
}

void ForwardScope::Finish(const std::vector<at::Tensor*>& outputs) {
  const absl::Status status =
      state_->model().PostForward(state_->unit(), outputs, state_->inputs);
  // PostForward() has cleaned up if it returns an error, but not if it throws.
  state_->finished = true;
  ThrowIfError(status);
}

absl::Status Tie(const at::Tensor& parameter, const at::Tensor& tied) {
  if (!parameter.defined() || !tied.defined()) {
    return absl::InvalidArgumentError("an undefined parameter cannot be tied");
  }
  if (parameter.sizes() != tied.sizes() ||
      parameter.scalar_type() != tied.scalar_type() ||
      parameter.device() != tied.device()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters that differ cannot be tied: ", Describe(parameter), " and ",
        Describe(tied)));
  }
  for (const at::Tensor* each : {&parameter, &tied}) {
    if (flat_param::IsGuarded(each->storage())) {
      return absl::FailedPreconditionError(
          "a sharded parameter cannot be tied: tie before sharding");
    }
    if (each->grad().defined()) {
      return absl::FailedPreconditionError(
          "a parameter that has a gradient cannot be tied: tie before "
          "training");
    }
  }
  return TorchToStatus("tying parameters",
                       [&] { tied.set_data(parameter.detach()); });
}

}  // namespace fsdp
