// Packs the values of a tensor into one piece of bytes, and makes the same
// tensor of them again.
#ifndef FSDP_RECOMPUTE_PACKED_FORM_H_
#define FSDP_RECOMPUTE_PACKED_FORM_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

// The bytes have each element once, even of an expanded tensor. The tensor made
// of them has the same sizes, strides, dtype, device and bits in its own
// storage, and the same distance from a multiple of 64 bytes, which may change
// how kernels round.
class PackedForm {
 public:
  // Returns no form for a tensor that has no elements or overlapping ones, that
  // is more than its bytes (sparse, quantized, nested, conjugated, of
  // InferenceMode, ...), or that lies in the memory of a sharded parameter.
  static std::optional<PackedForm> Of(const at::Tensor& tensor);

  int64_t bytes() const { return bytes_; }
  c10::Device device() const { return device_; }

  // Returns a tensor on device() with the values of `tensor`, which has this
  // form, in the bytes() bytes from its data pointer on: `tensor`, detached, if
  // it is dense, else a copy.
  at::Tensor Pack(const at::Tensor& tensor) const;
  // Returns an uninitialised tensor on device() for bytes() bytes. On the CPU
  // it starts at a page if the form allows.
  at::Tensor Allocate() const;
  // Returns the bytes of a tensor that Pack() or Allocate() has returned, 1-D.
  at::Tensor BytesOf(const at::Tensor& packed) const;
  // Returns the tensor; it may be `packed` itself.
  at::Tensor Unpack(const at::Tensor& packed) const;

  // "Float [2, 3] on cpu".
  std::string ToString() const;

  friend bool operator==(const PackedForm& a, const PackedForm& b);

 private:
  PackedForm() = default;

  // Returns an uninitialised tensor with this form's sizes and strides.
  at::Tensor AllocateStrided() const;
  // Returns a view that has every element of `tensor` once.
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

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_PACKED_FORM_H_
