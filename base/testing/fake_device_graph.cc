#include "base/testing/fake_device_graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include "absl/strings/str_cat.h"
#include "base/testing/fake_device_capture.h"
#include "base/testing/fake_device_state.h"

namespace fsdp::testing {

using fake_device::Capture;
using fake_device::State;

absl::StatusOr<std::unique_ptr<DeviceGraph>> FakeDeviceGraph::Make(
    c10::Device device) {
  if (device != fake_device::TheDevice()) {
    return absl::InvalidArgumentError(
        absl::StrCat(device.str(), " is not the fake device"));
  }
  return std::make_unique<FakeDeviceGraph>();
}

FakeDeviceGraph::FakeDeviceGraph() = default;
FakeDeviceGraph::~FakeDeviceGraph() { FakeDeviceGraph::Reset(); }

absl::Status FakeDeviceGraph::BeginCapture() {
  const int64_t stream = State::CurrentStream();
  if (capture_ != nullptr) {
    return absl::FailedPreconditionError("a graph holds a capture already");
  }
  if (stream == 0) {
    return absl::FailedPreconditionError(
        "the default stream cannot be captured");
  }
  capture_ = std::make_shared<Capture>(stream);
  if (State::Get().BeginCapture(capture_)) return absl::OkStatus();
  capture_.reset();
  return absl::FailedPreconditionError("another capture is under way");
}

absl::Status FakeDeviceGraph::EndCapture() {
  if (capture_ == nullptr || is_over_) {
    return absl::FailedPreconditionError("no capture is under way");
  }
  const std::string reason = State::Get().EndCapture();
  is_over_ = true;
  if (!reason.empty()) {
    Reset();
    return absl::FailedPreconditionError(
        absl::StrCat("the capture is invalid: ", reason));
  }
  for (int64_t stream : capture_->streams()) {
    actors_[stream] = HappensBefore::ActorOf(
        State::Get().NewStream(/*from_pool=*/false, /*high_priority=*/false));
  }
  return absl::OkStatus();
}

absl::Status FakeDeviceGraph::Replay() {
  if (!is_over_) return absl::FailedPreconditionError("nothing was captured");
  const c10::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::string reason = State::Get().Replay(*capture_, actors_);
  if (reason.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the graph cannot be replayed: ", reason));
}

void FakeDeviceGraph::Reset() {
  if (capture_ != nullptr && !is_over_) State::Get().EndCapture();
  capture_.reset();
  actors_.clear();
  is_over_ = false;
}

std::vector<std::string> FakeDeviceGraph::Operations() const {
  return is_over_ ? capture_->Operations() : std::vector<std::string>();
}

}  // namespace fsdp::testing
