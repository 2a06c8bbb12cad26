// How the values of a tensor lie in memory as one piece of bytes, and how the
// same tensor is made of them again.
#ifndef FSDP_RECOMPUTE_PACKED_FORM_H_
#define FSDP_RECOMPUTE_PACKED_FORM_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

// Each element is there once, also of an expanded tensor. What is made of the
// bytes has the same sizes, strides, dtype, device and bits, and lies as far
// from a multiple of 64 bytes, since kernels may round by that. Its storage is
// its own.
class PackedForm {
 public:
  // Nothing for a tensor without elements, or that is more than its bytes
  // (sparse, quantized, nested, conjugated, of InferenceMode, ...), or whose
  // elements overlap, or in the memory of a sharded parameter.
  static std::optional<PackedForm> Of(const at::Tensor& tensor);

  int64_t bytes() const { return bytes_; }
  c10::Device device() const { return device_; }

  // A tensor on device() with the values of `tensor`, whose form this is, in
  // the bytes() bytes from its data pointer on: the tensor itself where it is
  // dense, else a copy.
  at::Tensor Pack(const at::Tensor& tensor) const;
  // A tensor on device() for bytes() bytes of other origin, which starts at a
  // page of the CPU if the form allows.
  at::Tensor Allocate() const;
  // What a tensor that Pack() or Allocate() gave has in these bytes: 1-D.
  at::Tensor BytesOf(const at::Tensor& packed) const;
  // The tensor. May be `packed` itself.
  at::Tensor Unpack(const at::Tensor& packed) const;

  // "Float [2, 3] on cpu".
  std::string ToString() const;

  friend bool operator==(const PackedForm& a, const PackedForm& b);

 private:
  PackedForm() = default;

  // Of any values, with this form's sizes and strides.
  at::Tensor AllocateStrided() const;
  // Every element of `tensor` once.
  at::Tensor Elements(const at::Tensor& tensor) const;

  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  std::vector<int64_t> distinct_;  // sizes_, but 1 where the tensor is expanded
  at::ScalarType dtype_ = at::kFloat;
  c10::Device device_ = c10::Device(c10::kCPU);
  int64_t misalignment_ = 0;  // bytes from a multiple of 64
  int64_t span_ = 0;          // elements from the first to the last in memory
  int64_t bytes_ = 0;
  bool packed_already_ = false;
};

// What a computation depends on besides its arguments: the default random
// number generators and autocast.

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

#endif  // FSDP_RECOMPUTE_PACKED_FORM_H_
