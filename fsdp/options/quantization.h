// Options to send int8 instead of floating-point numbers in training.
#ifndef FSDP_OPTIONS_QUANTIZATION_H_
#define FSDP_OPTIONS_QUANTIZATION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace fsdp {

namespace comm {
class GatherExtension;
class QuantizationLog;
struct QuantizationOptions;
}  // namespace comm

// Quantises all-gathers of parameters for forward and backward, and
// reduce-scatters of gradients, as comm/quantized/quantized_communicator.h
// does. It applies to units that are sharded over more than one rank. All ranks
// compute with the same bits. These stay exact: shards, and so optimizers,
// state dicts and full parameters; the smaller gathers of backward
// (UnitOptions::backward_group_size), so that it computes with what forward
// had; all-reduces over replicate groups, of kNoShard and of norms; and which
// parameters were used.
//
// All fields but the log are the same on all ranks.
struct Quantization {
  // Quantises parameters. Units are gathered even if Options::share_memory
  // would spare it, so that results do not depend on where ranks are.
  bool gather = false;
  // Quantises gradients, unless a hook of the user reduces them.
  bool reduce = false;
  int64_t block = 256;    // numbers that share a scale
  int64_t min_bytes = 0;  // whole flat parameters and buffers below are exact
  // If not null, `gather` sends its form of the parameters instead of int8
  // blocks, for example float8 (comm/quantized/quantization_log.h), and `block`
  // and `min_bytes` apply to sums alone. Each rank has its own object.
  std::shared_ptr<comm::GatherExtension> gather_extension = nullptr;
  // Records what each collective of this rank loses, for which the host waits
  // for the device. It outlives the model.
  comm::QuantizationLog* log = nullptr;

  bool any() const { return gather || reduce; }
  // InvalidArgument: a number is out of range, or there is an extension without
  // `gather`.
  absl::Status Validate() const;
  // The options of a group's communicator. The last `exact_tail` elements of
  // each rank's part of a sum are exact.
  comm::QuantizationOptions ForGroup(int64_t exact_tail) const;
  // Returns "gathers, sums in blocks of 256 from 0 bytes on", with the text of
  // an extension, or an empty string if nothing is quantised.
  std::string ToString() const;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_QUANTIZATION_H_
