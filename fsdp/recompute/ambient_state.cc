#include "fsdp/recompute/ambient_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <mutex>
#include <vector>

namespace fsdp {

AmbientState AmbientState::Capture(const std::vector<c10::Device>& devices,
                                   bool random) {
  AmbientState state;
  state.devices_.push_back(c10::Device(c10::kCPU));
  for (const c10::Device& device : devices) state.devices_.push_back(device);
  for (const c10::Device& device : state.devices_) {
    if (random) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      state.generator_states_.push_back(generator.get_state());
    }
    if (!at::autocast::is_autocast_available(device.type())) continue;
    state.autocasts_.push_back(
        {device.type(), at::autocast::is_autocast_enabled(device.type()),
         at::autocast::get_autocast_dtype(device.type())});
  }
  state.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AmbientState::Apply() const {
  for (size_t i = 0; i < generator_states_.size(); ++i) {
    at::Generator generator = at::globalContext().defaultGenerator(devices_[i]);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(generator_states_[i]);
  }
  for (const Autocast& autocast : autocasts_) {
    at::autocast::set_autocast_enabled(autocast.device_type, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device_type, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

AmbientStateGuard::AmbientStateGuard(const AmbientState& state)
    : previous_(AmbientState::Capture(
          {state.devices_.begin() + 1, state.devices_.end()},
          /*random=*/!state.generator_states_.empty())) {
  state.Apply();
  at::autocast::increment_nesting();
}

AmbientStateGuard::~AmbientStateGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  previous_.Apply();
}

}  // namespace fsdp
