// Collectives that send int8 instead of floating-point numbers.
#ifndef COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
#define COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "comm/quantized/quantization_log.h"

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
// InvalidArgument: an option is out of range.
CreatedCommunicator CreateQuantizedCommunicator(
    const std::shared_ptr<Communicator>& base,
    const QuantizationOptions& options);

// These return how many bytes a rank allocates for the messages of one
// collective in which each rank's part has `numel` elements of `dtype`, or 0 if
// the numbers are sent as they are.
int64_t GatherMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                           const QuantizationOptions& options);
int64_t SumMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                        const QuantizationOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
