#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "base/tensor_over.h"
#include "comm/quantized/quantized_communicator.h"
#include "device_ops/pack.h"

namespace fsdp::comm {
namespace {

constexpr int64_t kAlignment = 16;
constexpr int64_t kGroup = 8;  // elements that a kernel moves at a time

int64_t Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Return the columns of `numbers`, which has a row for each message.
at::Tensor Quantized(const MessageLayout& layout, const at::Tensor& numbers) {
  return numbers.view({-1, layout.numel()}).narrow(1, 0, layout.quantized());
}
at::Tensor Exact(const MessageLayout& layout, const at::Tensor& numbers) {
  return numbers.view({-1, layout.numel()})
      .narrow(1, layout.quantized(), layout.exact());
}

}  // namespace

MessageLayout::MessageLayout(int64_t numel, int64_t exact, int64_t block,
                             at::ScalarType dtype)
    : numel_(numel),
      quantized_(std::max<int64_t>(0, numel - exact) / kGroup * kGroup),
      block_(block),
      dtype_(dtype),
      exact_begin_(Aligned(device_ops::NumBlocks(quantized_, block) *
                           static_cast<int64_t>(sizeof(float)))),
      values_begin_(Aligned(exact_begin_ +
                            (numel - quantized_) *
                                static_cast<int64_t>(c10::elementSize(dtype)))),
      bytes_(std::max(kAlignment, Aligned(values_begin_ + quantized_))) {}

at::Tensor MessageLayout::Part(const at::Tensor& messages, int64_t begin,
                               int64_t size, at::ScalarType dtype) const {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t sizes[] = {messages.numel() / bytes_, size};
  const int64_t strides[] = {bytes_ / element, 1};
  return TensorOver(messages.storage(),
                    (messages.storage_offset() + begin) / element, sizes,
                    strides, dtype);
}

at::Tensor MessageLayout::Scales(const at::Tensor& messages) const {
  return Part(messages, 0, device_ops::NumBlocks(quantized_, block_),
              at::kFloat);
}

at::Tensor MessageLayout::Exact(const at::Tensor& messages) const {
  return Part(messages, exact_begin_, exact(), dtype_);
}

at::Tensor MessageLayout::Values(const at::Tensor& messages) const {
  return Part(messages, values_begin_, quantized_, at::kChar);
}

void WriteMessages(const MessageLayout& layout, const at::Tensor& numbers,
                   const at::Tensor& messages) {
  device_ops::Quantize(Quantized(layout, numbers), layout.block(),
                       layout.Values(messages), layout.Scales(messages));
  if (layout.exact() > 0) {
    layout.Exact(messages).copy_(Exact(layout, numbers));
  }
}

void ReadMessages(const MessageLayout& layout, const at::Tensor& messages,
                  const at::Tensor& numbers) {
  device_ops::Dequantize(Quantized(layout, numbers), layout.Values(messages),
                         layout.Scales(messages), layout.block());
  if (layout.exact() > 0) {
    Exact(layout, numbers).copy_(layout.Exact(messages));
  }
}

void SumMessages(const MessageLayout& layout, const at::Tensor& messages,
                 device_ops::SumUse use, const at::Tensor& out) {
  device_ops::DequantizeSum(out.narrow(0, 0, layout.quantized()),
                            layout.Values(messages), layout.Scales(messages),
                            layout.block(), use);
  if (layout.exact() == 0) return;
  const at::Tensor rows = layout.Exact(messages);
  const bool is_double = rows.scalar_type() == at::kDouble;
  const at::Tensor sum = at::sum(rows, {0}, /*keepdim=*/false,
                                 is_double ? at::kDouble : at::kFloat);
  const at::Tensor tail = out.narrow(0, layout.quantized(), layout.exact());
  device_ops::CopyScaled(tail, sum, use.factor, use.accumulate);
}

QuantizationError MeasureMessages(const MessageLayout& layout,
                                  const at::Tensor& numbers,
                                  const at::Tensor& messages) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  QuantizationError error;
  const at::Tensor in = Quantized(layout, numbers);
  const at::Tensor difference =
      at::empty(in.sizes(), in.options().dtype(at::kDouble));
  device_ops::Dequantize(difference, layout.Values(messages),
                         layout.Scales(messages), layout.block());
  const at::Tensor lost = difference.isnan();
  error.not_finite = lost.sum().item<int64_t>();
  difference.sub_(in).masked_fill_(lost, 0);
  error.max_abs = difference.abs().max().item<double>();
  error.squared_error = difference.square_().sum().item<double>();
  error.squared_norm =
      in.to(at::kDouble).masked_fill(lost, 0).square().sum().item<double>();
  return error;
}

}  // namespace fsdp::comm
