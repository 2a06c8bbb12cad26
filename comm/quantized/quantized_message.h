// Messages between ranks: int8 blocks, their scales, and numbers that have to
// stay exact.
#ifndef COMM_QUANTIZED_QUANTIZED_MESSAGE_H_
#define COMM_QUANTIZED_QUANTIZED_MESSAGE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/quantized/quantization_log.h"
#include "device_ops/block_quantization.h"

namespace fsdp::comm {

// A message of `numel` elements has their scales, the exact elements and the
// int8 values, in this order, each part aligned. The last `exact` elements are
// sent as they are, with the few before them that do not fill a group of eight.
class MessageLayout {
 public:
  MessageLayout(int64_t numel, int64_t exact, int64_t block,
                at::ScalarType dtype);

  int64_t numel() const { return numel_; }
  int64_t quantized() const { return quantized_; }
  int64_t exact() const { return numel_ - quantized_; }
  int64_t block() const { return block_; }
  int64_t bytes() const { return bytes_; }  // > 0

  // These return a part of `messages`, which are uint8 and a multiple of
  // bytes(), with a row for each message.
  at::Tensor Scales(const at::Tensor& messages) const;
  at::Tensor Exact(const at::Tensor& messages) const;
  at::Tensor Values(const at::Tensor& messages) const;

 private:
  at::Tensor Part(const at::Tensor& messages, int64_t begin, int64_t size,
                  at::ScalarType dtype) const;

  const int64_t numel_;
  const int64_t quantized_;
  const int64_t block_;
  const at::ScalarType dtype_;
  const int64_t exact_begin_;
  const int64_t values_begin_;
  const int64_t bytes_;
};

// Writes numbers.numel() / numel() messages, one after the other.
void WriteMessages(const MessageLayout& layout, const at::Tensor& numbers,
                   const at::Tensor& messages);

// Writes the numbers of all messages to `numbers`.
void ReadMessages(const MessageLayout& layout, const at::Tensor& messages,
                  const at::Tensor& numbers);

// Writes the sum of the messages, numel() numbers, to `out`.
void SumMessages(const MessageLayout& layout, const at::Tensor& messages,
                 device_ops::SumUse use, const at::Tensor& out);

// Returns what the messages of `numbers` have lost. The host waits for the
// device.
QuantizationError MeasureMessages(const MessageLayout& layout,
                                  const at::Tensor& numbers,
                                  const at::Tensor& messages);

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZED_MESSAGE_H_
