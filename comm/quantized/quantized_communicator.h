// Collectives that send int8 instead of floating-point numbers.
#ifndef COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
#define COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/quantized/quantization_log.h"

namespace fsdp::comm {

// The same on all ranks, but for the log.
struct QuantizationOptions {
  bool gather = true;     // all-gathers
  bool reduce = true;     // reduce-scatters that sum
  int64_t block = 256;    // numbers that share a scale
  int64_t min_bytes = 0;  // whole tensors below travel as they are
  // The last elements of each rank's part of a reduce-scatter that are summed
  // exactly: flags and counts.
  int64_t exact_tail = 0;
  // What all-gathers send instead of int8 blocks, whatever `block` and
  // `min_bytes` are; null: int8.
  std::shared_ptr<GatherExtension> gather_extension = nullptr;
  // Is told what each collective of this rank loses, for which the host waits
  // for the device; outlives the communicator and its sub-groups.
  QuantizationLog* log = nullptr;
};

// All-gathers and sums of reduce-scatters on floating-point tensors as in
// ZeRO++ (Wang et al., 2023), over `base`: about a quarter of the bytes of
// float32, half of those of the halves, and an error of at most half of 1/127
// of the largest number of a block, for a sum from each rank once
// (device_ops/block_quantization.h). A reduce-scatter is an all-to-all after
// which each rank sums what it has got, in float32 and in the order of the
// ranks; it is rounded once, to the dtype of the output. So nothing is added
// inside a host before it leaves it: n ranks per host send n times as much
// between hosts as where something is. Everything else, and groups of one rank,
// is exact and `base`'s.
//
// The same inputs give the same bits every time, and an all-gather gives them
// to all ranks: this rank's own part becomes what the others get to see, also
// where `in` is that part. So ranks have no memory in common: AllocateCommon()
// is Unimplemented where all-gathers are quantised.
//
// Outputs are written when a Work is waited for, after
// Work::BlockCurrentStream() on the stream that was current then; inputs are
// free as soon as a call has returned, in the order of the current stream. Not
// at all where nobody waits. The stream of the call gets the memory of messages
// back and waits for the one that wrote the output. Sub-groups of Split() are
// quantised, too.
//
// InvalidArgument: an option is out of range.
absl::StatusOr<std::unique_ptr<Communicator>> CreateQuantizedCommunicator(
    const std::shared_ptr<Communicator>& base,
    const QuantizationOptions& options);

// What a rank of `world_size` allocates for the messages of one collective in
// which each rank's part are `numel` elements of `dtype`; 0 where they travel
// as they are.
int64_t GatherMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                           const QuantizationOptions& options);
int64_t SumMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                        const QuantizationOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZED_COMMUNICATOR_H_
