#include "base/testing/fake_device.h"

#include <c10/core/GradMode.h>

#include <string>
#include <utility>

#include "base/testing/fake_device_state.h"

namespace fsdp::testing {

using fake_device::State;

void FakeDevice::Register() {
  static const bool done = [] {
    fake_device::RegisterRuntime();
    fake_device::RegisterOperators();
    return true;
  }();
  (void)done;
}

c10::Device FakeDevice::device() { return fake_device::TheDevice(); }

void FakeDevice::Move(const std::vector<at::Tensor>& tensors) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor moved = tensor.detach().to(device());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

void FakeDevice::Reset() { State::Get().Reset(); }
std::vector<std::string> FakeDevice::Races() { return State::Get().Races(); }
std::vector<std::string> FakeDevice::HostWaits() {
  return State::Get().HostWaits();
}
FakeDevice::Calls FakeDevice::calls() { return State::Get().calls(); }
int64_t FakeDevice::bytes_in_use() { return State::Get().bytes_in_use(); }
int64_t FakeDevice::peak_bytes() { return State::Get().peak_bytes(); }

void FakeDevice::Pin(void* memory, int64_t bytes) {
  State::Get().Pin(memory, bytes);
}

void FakeDevice::Unpin(void* memory) { State::Get().Unpin(memory); }

void FakeDevice::Touch(const at::Tensor& tensor, bool writes,
                       absl::string_view what) {
  State::Get().RefuseInCapture(what);
  State::Get().Access(State::CurrentActor(), tensor, writes, what);
}

void FakeDevice::HostRead(const at::Tensor& tensor, absl::string_view what) {
  State::Get().Access(HappensBefore::kHost, tensor, /*writes=*/false, what);
}

void FakeDevice::HostWrite(const at::Tensor& tensor, absl::string_view what) {
  State::Get().Access(HappensBefore::kHost, tensor, /*writes=*/true, what);
}

FakeDevice::Stall::Stall() { State::Get().Stall(1); }
FakeDevice::Stall::~Stall() { State::Get().Stall(-1); }

FakeDevice::Label::Label(absl::string_view text) : outer_(State::label()) {
  State::SetLabel(std::string(text));
}
FakeDevice::Label::~Label() { State::SetLabel(outer_); }

}  // namespace fsdp::testing
