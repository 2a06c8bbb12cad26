// What a computation depends on besides its arguments: the default random
// number generators and autocast.
#ifndef FSDP_RECOMPUTE_AMBIENT_STATE_H_
#define FSDP_RECOMPUTE_AMBIENT_STATE_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace fsdp {

// Of the CPU and of some more devices, as it was on this thread at a moment.
class AmbientState {
 public:
  // `devices`: besides the CPU. Generators only with `random`.
  static AmbientState Capture(const std::vector<c10::Device>& devices,
                              bool random);

 private:
  friend class AmbientStateGuard;

  struct Autocast {
    c10::DeviceType device_type;
    bool enabled;
    at::ScalarType dtype;
  };

  void Apply() const;

  std::vector<c10::Device> devices_;
  std::vector<at::Tensor>
      generator_states_;  // of the CPU and devices_, or none
  std::vector<Autocast> autocasts_;
  bool autocast_cache_ = true;
};

// Makes a state the current one for as long as it lives.
class AmbientStateGuard {
 public:
  explicit AmbientStateGuard(const AmbientState& state);
  AmbientStateGuard(const AmbientStateGuard&) = delete;
  AmbientStateGuard& operator=(const AmbientStateGuard&) = delete;
  ~AmbientStateGuard();

 private:
  const AmbientState previous_;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_AMBIENT_STATE_H_
