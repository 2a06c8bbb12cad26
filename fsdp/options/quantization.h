// Whether training sends int8 instead of floating-point numbers.
#ifndef FSDP_OPTIONS_QUANTIZATION_H_
#define FSDP_OPTIONS_QUANTIZATION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"

namespace fsdp {

// As comm/quantized/quantized_communicator.h, for training only: all-gathers of
// parameters for forward and backward, and reduce-scatters of gradients, of
// units that are sharded over more than one rank. All ranks compute with the
// same bits. Exact are the shards themselves and with them optimizers, state
// dicts and full parameters; the smaller gathers of backward, so that it
// computes with what forward had; all-reduces over replicas, of kNoShard and of
// norms; which parameters were used.
//
// The same on all ranks, but for the log.
struct Quantization {
  // Parameters. Units are gathered then also where Options::share_memory would
  // spare it, so that where ranks are does not change what they compute.
  bool gather = false;
  // Gradients, where no hook of the user's own reduces them.
  bool reduce = false;
  int64_t block = 256;    // numbers that share a scale
  int64_t min_bytes = 0;  // whole flat parameters and buffers below are exact
  // What `gather` sends instead of int8 blocks
  // (comm/quantized/quantization_log.h): a float8 or lower-rank form of the
  // parameters, for example; null: int8. Of this rank; `block` and `min_bytes`
  // are then of sums alone.
  std::shared_ptr<comm::GatherExtension> gather_extension = nullptr;
  // Is told what each collective of this rank loses, for which the host waits
  // for the device; outlives the model.
  comm::QuantizationLog* log = nullptr;

  bool any() const { return gather || reduce; }
  // InvalidArgument: a number is out of range.
  absl::Status Validate() const;
  // The last `exact_tail` elements of each rank's part of a sum are exact.
  comm::QuantizationOptions ForGroup(int64_t exact_tail) const;
  // "gathers, sums in blocks of 256 from 0 bytes on", with what an extension
  // says of itself; empty: none of it.
  std::string ToString() const;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_QUANTIZATION_H_
