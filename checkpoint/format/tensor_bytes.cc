#include "checkpoint/format/tensor_bytes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::pair<c10::ScalarType, Dtype> kPairs[] = {
    {c10::ScalarType::Bool, Dtype::kBool},
    {c10::ScalarType::Byte, Dtype::kU8},
    {c10::ScalarType::Char, Dtype::kI8},
    {c10::ScalarType::Float8_e5m2, Dtype::kF8E5M2},
    {c10::ScalarType::Float8_e4m3fn, Dtype::kF8E4M3},
    {c10::ScalarType::Float8_e8m0fnu, Dtype::kF8E8M0},
    {c10::ScalarType::Float8_e4m3fnuz, Dtype::kF8E4M3Fnuz},
    {c10::ScalarType::Float8_e5m2fnuz, Dtype::kF8E5M2Fnuz},
    {c10::ScalarType::Short, Dtype::kI16},
    {c10::ScalarType::UInt16, Dtype::kU16},
    {c10::ScalarType::Half, Dtype::kF16},
    {c10::ScalarType::BFloat16, Dtype::kBF16},
    {c10::ScalarType::Int, Dtype::kI32},
    {c10::ScalarType::UInt32, Dtype::kU32},
    {c10::ScalarType::Float, Dtype::kF32},
    {c10::ScalarType::ComplexFloat, Dtype::kC64},
    {c10::ScalarType::Double, Dtype::kF64},
    {c10::ScalarType::Long, Dtype::kI64},
    {c10::ScalarType::UInt64, Dtype::kU64},
};

int64_t ItemBytes(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Returns whether a cast may make a finite value infinite. A larger
// floating-point type has a larger range, too.
bool MayOverflow(c10::ScalarType own, c10::ScalarType cast) {
  return own != cast && ItemBytes(own) >= ItemBytes(cast);
}

}  // namespace

std::optional<Dtype> FileDtype(c10::ScalarType dtype) {
  for (const auto& [torch, file] : kPairs) {
    if (torch == dtype) return file;
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> TorchDtype(Dtype dtype) {
  for (const auto& [torch, file] : kPairs) {
    if (file == dtype) return torch;
  }
  return std::nullopt;
}

absl::Status CheckFits(const at::Tensor& own, const at::Tensor& cast,
                       absl::string_view advice) {
  if (!MayOverflow(own.scalar_type(), cast.scalar_type()) ||
      !cast.isinf().any().item<bool>()) {
    return absl::OkStatus();
  }
  const at::Tensor values = own.cpu();
  const at::Tensor large =
      values.masked_select(cast.isinf().logical_and(values.isfinite()));
  if (large.numel() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "it has the value ", large[0].item<double>(),
      ", which would become infinite in ", c10::toString(cast.scalar_type()),
      ": take ", c10::toString(own.scalar_type()), advice));
}

absl::Status ReadElements(const at::Tensor& values, c10::ScalarType dtype,
                          int64_t position, absl::Span<char> out) {
  const auto size = static_cast<int64_t>(out.size());
  const int64_t item = ItemBytes(dtype);
  FSDP_CHECK(position >= 0 && size <= values.numel() * item - position);
  if (size == 0) return absl::OkStatus();
  return TorchToStatus("writing a tensor", [&] {
    const NormalMode normal;
    const c10::NoGradGuard no_grad;
    const int64_t begin = position / item;
    const int64_t end = (position + size + item - 1) / item;
    at::Tensor part = values.detach().narrow(0, begin, end - begin);
    if (part.scalar_type() != dtype || !part.is_cpu()) {
      const at::Tensor own = part;
      part = part.to(at::TensorOptions().dtype(dtype).device(at::kCPU));
      ThrowIfError(CheckFits(own, part,
                             " (ExportOptions::dtype, "
                             "CheckpointerOptions::model_dtype; --dtype F32, "
                             "--precision=fp32)"));
    }
    // Lazy conjugation and negation are not in the bytes.
    part = part.resolve_conj().resolve_neg().contiguous();
    const auto* const bytes = static_cast<const char*>(part.const_data_ptr());
    std::memcpy(out.data(), bytes + (position - begin * item), out.size());
  });
}

TensorSink::TensorSink(at::Tensor values, c10::ScalarType dtype)
    : values_(std::move(values)), dtype_(dtype) {}

absl::Status TensorSink::Write(int64_t position, absl::Span<const char> bytes) {
  const int64_t item = ItemBytes(dtype_);
  const auto cut = static_cast<int64_t>(cut_.size());
  FSDP_CHECK(position % item == cut);
  int64_t begin = position / item;
  if (cut > 0) {
    const auto missing =
        std::min(static_cast<size_t>(item - cut), bytes.size());
    cut_.append(bytes.data(), missing);
    bytes.remove_prefix(missing);
    if (static_cast<int64_t>(cut_.size()) < item) return absl::OkStatus();
    const absl::Status written = WriteElements(begin++, cut_, /*stay=*/false);
    cut_.clear();
    if (!written.ok()) return written;
  }
  const size_t whole = bytes.size() / item * item;
  cut_.assign(bytes.data() + whole, bytes.size() - whole);
  return WriteElements(begin, bytes.first(whole), /*stay=*/true);
}

absl::Status TensorSink::WriteElements(int64_t begin,
                                       absl::Span<const char> bytes,
                                       bool stay) {
  if (bytes.empty()) return absl::OkStatus();
  return TorchToStatus("reading a tensor", [&] {
    const NormalMode normal;
    const c10::NoGradGuard no_grad;
    const int64_t item = ItemBytes(dtype_);
    const int64_t count = static_cast<int64_t>(bytes.size()) / item;
    if (values_.is_cpu() && values_.scalar_type() == dtype_ &&
        values_.is_contiguous() && !values_.is_conj() && !values_.is_neg()) {
      std::memcpy(static_cast<char*>(values_.mutable_data_ptr()) + begin * item,
                  bytes.data(), bytes.size());
      // As copy_() does it, for graphs that have computed with the values.
      if (!values_.is_inference()) {
        values_.unsafeGetTensorImpl()->bump_version();
      }
      return;
    }
    const bool in_place =
        stay && reinterpret_cast<uintptr_t>(bytes.data()) % item == 0;
    at::Tensor elements;
    if (in_place) {
      elements =
          at::from_blob(const_cast<char*>(bytes.data()), {count}, dtype_);
    } else {
      elements = at::empty({count}, dtype_);
      std::memcpy(elements.mutable_data_ptr(), bytes.data(), bytes.size());
    }
    const at::Tensor target = values_.detach().narrow(0, begin, count);
    if (MayOverflow(dtype_, values_.scalar_type())) {
      const at::Tensor cast = elements.to(values_.scalar_type());
      ThrowIfError(CheckFits(elements, cast, kAdviceForLoading));
      target.copy_(cast);
    } else {
      // A device then casts what it has got.
      target.copy_(elements, /*non_blocking=*/in_place);
    }
  });
}

}  // namespace fsdp::checkpoint
