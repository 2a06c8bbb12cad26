#include "fsdp/transparent/write_watch.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"

namespace fsdp {

WriteWatch::WriteWatch(ShardedModel* model)
    : model_(model), units_(model->num_units()) {
  for (int unit = 0; unit < model_->num_units(); ++unit) {
    units_[unit].tag = {this, unit};
    for (const auto& flat : model_->flats(unit)) {
      flat->SetTag(&units_[unit].tag);
    }
  }
}

WriteWatch::~WriteWatch() {
  for (int unit = 0; unit < model_->num_units(); ++unit) {
    for (const auto& flat : model_->flats(unit)) {
      flat->SetTag(nullptr);
    }
  }
}

int WriteWatch::Mode() const {
  return (c10::GradMode::is_enabled() ? 2 : 0) +
         (model_->is_training() ? 1 : 0);
}

// A forward inside a watched one is watched, too.
void WriteWatch::AfterPreForward(int unit) {
  if (InsideBackward()) return;
  bool& seen = units_[unit].seen[Mode()];
  if (watched_ == 0 && seen) return;
  seen = true;
  if (watched_++ == 0) observer_.emplace();
}

absl::Status WriteWatch::BeforePostForward(int,
                                           const std::vector<at::Tensor*>&) {
  return TakeFailure();
}

void WriteWatch::AfterPostForward(
    int, const std::vector<std::shared_ptr<torch::autograd::Node>>&) {
  if (InsideBackward() || watched_ == 0) return;
  if (--watched_ == 0) observer_.reset();
}

void WriteWatch::OnGivenUp() {
  watched_ = 0;
  observer_.reset();
  failure_ = absl::OkStatus();
}

absl::Status WriteWatch::TakeFailure() {
  return std::exchange(failure_, absl::OkStatus());
}

void WriteWatch::OnWrite(const at::Tensor& tensor, int unit) {
  if (watched_ == 0 || InsideBackward()) return;
  failure_.Update(model_->RefuseWrite(unit, tensor));
  // The next forward may do it again.
  for (UnitState& state : units_) state.seen = {};
}

}  // namespace fsdp
