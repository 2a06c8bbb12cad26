#include "fsdp/model/forward.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "base/torch_status.h"
#include "fsdp/model/model_view.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

ForwardScope::ForwardScope(const torch::nn::Module& module)
    : handle_(FindUnit(module)) {
  if (!handle_.has_value()) return;
  // If this throws, the destructor does not run, but PreForward() has cleaned
  // up.
  ThrowIfError(handle_->model()->PreForward(handle_->unit()));
  const auto& running = handle_->model()->running_unit(handle_->unit());
  if (running != nullptr) scope_.emplace(running);
  watches_inputs_ = c10::GradMode::is_enabled();
}

ForwardScope::~ForwardScope() {
  if (!handle_.has_value() || finished_) return;
  handle_->model()->AbandonForward(handle_->unit(), thrown_);
}

bool ForwardScope::casts_inputs() const {
  return handle_->model()->CastsInputs(handle_->unit());
}

void ForwardScope::CastInputs(const std::vector<at::Tensor*>& inputs) {
  handle_->model()->CastInputs(handle_->unit(), inputs);
}

void ForwardScope::WatchInput(const at::Tensor& input) {
  inputs_.Add(input);
  handle_->model()->WatchInput(handle_->unit(), input);
}

void ForwardScope::ThrowFailure() const {
  if (handle_.has_value()) ThrowIfError(handle_->model()->TakeFailure());
}

void ForwardScope::NoteException() {
  if (!handle_.has_value()) return;
  thrown_ = TorchToStatus("forward", [this] {
    try {
      throw;
    } catch (c10::Error& error) {
      // Only the innermost unit adds its name.
      if (error.context().empty()) {
        error.add_context(
            absl::StrCat("in the forward of unit ",
                         handle_->model()->unit_name(handle_->unit())));
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
  if (!handle.has_value() || !handle->model()->recomputes(handle->unit())) {
    return std::nullopt;
  }
  RecomputedUnit unit{handle->model()->unit_name(handle->unit()),
                      handle->model()->recompute_options()};
  // The module is shared, because its parent has it. The region keeps it alive.
  unit.options.modules.push_back(
      std::const_pointer_cast<torch::nn::Module>(module.shared_from_this()));
  return unit;
}

void ForwardScope::Finish(const std::vector<at::Tensor*>& outputs) {
  const absl::Status status =
      handle_->model()->PostForward(handle_->unit(), outputs, inputs_);
  // PostForward() has cleaned up if it returns an error, but not if it throws.
  finished_ = true;
  ThrowIfError(status);
}

}  // namespace fsdp
