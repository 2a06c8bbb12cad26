// Collectives that send int8 instead of floating-point numbers, and their
// messages: int8 blocks, their scales, and numbers that have to stay exact.
#ifndef COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
#define COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "comm/quantized/quantization_log.h"
#include "device_ops/block_quantization.h"

namespace fsdp::comm {

// All ranks pass the same, except the log.
struct QuantizationOptions {
  bool gather = true;     // quantise all-gathers
  bool reduce = true;     // quantise reduce-scatters that sum
  int64_t block = 256;    // numbers that share a scale
  int64_t min_bytes = 0;  // smaller tensors (of all ranks) are sent as they are
  // So many elements at the end of each rank's part of a reduce-scatter are
  // summed exactly, such as flags and counts.
  int64_t exact_tail = 0;
  // Chooses what all-gathers send, whatever `block` and `min_bytes` are. Null:
  // int8 blocks.
  std::shared_ptr<GatherExtension> gather_extension = nullptr;
  // Gets the error of each collective of this rank, for which the host waits
  // for the device. Outlives the communicator and its sub-groups.
  QuantizationLog* log = nullptr;
};

// Returns a communicator over `base` that quantises all-gathers and sums of
// reduce-scatters on floating-point tensors, as ZeRO++ does (Wang et al.,
// 2023). It sends about a quarter of the bytes of float32, or half of those of
// 16-bit numbers. The error of a number is at most half of 1/127 of the largest
// number of its block; a sum has that error once from each rank
// (device_ops/block_quantization.h). A reduce-scatter is an all-to-all, after
// which each rank sums its part in float32, in the order of the ranks, and
// rounds once, to the dtype of the output. So nothing is added inside a host
// before it leaves it: n ranks per host send n times as much between hosts as
// with a sum inside hosts. All other collectives, and those of one rank, are
// `base`'s and exact.
//
// The same inputs give the same bits every time, and an all-gather gives the
// same bits to all ranks: this rank's own part is also replaced by what the
// others get, even where `in` is that part. So if all-gathers are quantised,
// ranks have no memory in common, and AllocateCommon() is Unimplemented.
//
// Outputs are written when a Work is waited for: in Work::BlockCurrentStream()
// by the current stream. They are not written if nobody waits. Inputs are free
// when a call has returned, in the order of the current stream. The memory of
// messages returns to the stream of the call, which waits for the stream that
// writes the output. Sub-groups of Split() quantise, too.
//
// `options` are in the ranges that fsdp::Quantization::Validate() checks.
CreatedCommunicator CreateQuantizedCommunicator(
    const std::shared_ptr<Communicator>& base,
    const QuantizationOptions& options);

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

// These return how many bytes a rank allocates for the messages of one
// collective in which each rank's part has `numel` elements of `dtype`, or 0 if
// the numbers are sent as they are.
int64_t GatherMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                           const QuantizationOptions& options);
int64_t SumMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                        const QuantizationOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
