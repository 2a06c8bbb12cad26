#include "fsdp/recompute/packed_form.h"

#include <ATen/ops/empty.h>
#include <c10/core/Layout.h>
#include <c10/util/StringUtil.h>

#include "base/tensor_over.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/memory/buffer_layout.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::offload::kPageBytes;

// Kernels may depend on an address within a cache line, the widest vector.
constexpr int64_t kAlignment = 64;

int64_t AddressOf(const at::Tensor& tensor) {
  return static_cast<int64_t>(
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

bool IsMoreThanItsBytes(const at::Tensor& tensor) {
  return tensor.is_nested() || tensor.layout() != at::kStrided ||
         !tensor.has_storage() || tensor.is_meta() || tensor.is_quantized() ||
         tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() ||
         tensor.is_inference();
}

// Returns an uninitialised one-dimensional tensor that begins `misalignment`
// bytes behind a page on the CPU, and behind a cache line on other devices:
// their allocators align to more than that, and round up.
at::Tensor AllocateAligned(int64_t elements, at::ScalarType dtype,
                           c10::Device device, int64_t misalignment) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (!device.is_cpu()) {
    const int64_t before = misalignment / item;
    return at::empty({before + elements}, options).narrow(0, before, elements);
  }
  at::Tensor memory =
      at::empty({elements + (kPageBytes + kAlignment) / item}, options);
  const int64_t missing =
      (misalignment - AddressOf(memory) % kPageBytes + kPageBytes) % kPageBytes;
  return memory.narrow(0, missing / item, elements);
}

}  // namespace

std::optional<PackedForm> PackedForm::Of(const at::Tensor& tensor) {
  if (!tensor.defined() || IsMoreThanItsBytes(tensor) || tensor.numel() == 0 ||
      flat_param::IsGuarded(tensor.storage()) ||
      flat_param::IsGuarded(tensor.storage(), flat_param::Guarded::kResting)) {
    return std::nullopt;
  }
  const at::Tensor distinct = DistinctOf(tensor);
  const int64_t item = static_cast<int64_t>(tensor.itemsize());
  const int64_t address = AddressOf(tensor);
  if (address == 0 || address % item != 0 || !SharesNoElements(distinct)) {
    return std::nullopt;
  }
  PackedForm form;
  form.sizes_ = tensor.sizes().vec();
  form.strides_ = tensor.strides().vec();
  form.distinct_ = distinct.sizes().vec();
  form.dtype_ = tensor.scalar_type();
  form.device_ = tensor.device();
  form.span_ = 1;
  for (size_t i = 0; i < form.sizes_.size(); ++i) {
    form.span_ += (form.distinct_[i] - 1) * form.strides_[i];
  }
  form.misalignment_ = address % kAlignment;
  form.bytes_ = distinct.numel() * item;
  form.packed_already_ = form.span_ == distinct.numel();
  return form;
}

at::Tensor PackedForm::Pack(const at::Tensor& tensor) const {
  if (packed_already_) return tensor.detach();
  at::Tensor packed = Allocate();
  packed.view(distinct_).copy_(Elements(tensor.detach()));
  return packed;
}

at::Tensor PackedForm::Allocate() const {
  if (packed_already_) return AllocateStrided();
  return AllocateAligned(
             bytes_ / static_cast<int64_t>(c10::elementSize(dtype_)), dtype_,
             device_, /*misalignment=*/0)
      .detach();
}

at::Tensor PackedForm::BytesOf(const at::Tensor& packed) const {
  const int64_t offset =
      packed.storage_offset() * static_cast<int64_t>(packed.element_size());
  return TensorOver(packed.storage(), offset, {bytes_}, {1}, at::kByte);
}

at::Tensor PackedForm::Unpack(const at::Tensor& packed) const {
  if (packed_already_) return packed;
  at::Tensor tensor = AllocateStrided();
  Elements(tensor).copy_(packed.view(distinct_));
  return tensor;
}

// Detaches, so that autograd sees no view.
at::Tensor PackedForm::AllocateStrided() const {
  const at::Tensor memory =
      AllocateAligned(span_, dtype_, device_, misalignment_);
  return memory.as_strided(sizes_, strides_, memory.storage_offset()).detach();
}

at::Tensor PackedForm::Elements(const at::Tensor& tensor) const {
  return tensor.as_strided(distinct_, strides_, tensor.storage_offset());
}

std::string PackedForm::ToString() const {
  return c10::str(dtype_, " ", c10::IntArrayRef(sizes_), " on ", device_);
}

bool operator==(const PackedForm& a, const PackedForm& b) {
  return a.sizes_ == b.sizes_ && a.strides_ == b.strides_ &&
         a.dtype_ == b.dtype_ && a.device_ == b.device_ &&
         a.misalignment_ == b.misalignment_;
}

}  // namespace fsdp
