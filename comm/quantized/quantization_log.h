// Measures what quantised collectives lose, and lets users replace what
// all-gathers send.
#ifndef COMM_QUANTIZED_QUANTIZATION_LOG_H_
#define COMM_QUANTIZED_QUANTIZATION_LOG_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The loss of one or several quantised collectives.
struct QuantizationError {
  double max_abs = 0;        // of any element
  double squared_error = 0;  // summed over the elements
  double squared_norm = 0;   // of the original numbers
  // Elements of blocks that came back as NaN, which nothing else counts.
  int64_t not_finite = 0;

  // ||dequantised - in|| / ||in||; 0 if both are 0.
  double relative_l2() const;
};

// Adds up errors, by collective and label. Thread-safe, so that ranks may share
// one.
class QuantizationLog {
 public:
  // The errors of some collectives together.
  struct Totals {
    int64_t count = 0;        // of collectives
    QuantizationError error;  // of all their numbers
  };

  // Adds one collective of `label`.
  void Add(Collective collective, absl::string_view label,
           const QuantizationError& error);
  void Clear();  // forgets all that was added

  // Returns the totals of one kind, of all labels or of one; zeros where
  // nothing was added.
  Totals TotalsOf(Collective collective) const;
  Totals TotalsOf(Collective collective, absl::string_view label) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<std::pair<Collective, std::string>, Totals> totals_
      ABSL_GUARDED_BY(mutex_);
};

// Makes the messages that all-gathers of parameters send instead of numbers,
// such as int8 blocks (quantized_communicator.h), as FSDP2's
// fsdp_pre_all_gather() and fsdp_post_all_gather() do. One rank has it and uses
// it in one thread at a time. An exception becomes the error of the collective
// on this rank and ends the group.
//
// All ranks get the same bits: this rank also replaces its own numbers by what
// Read() makes of its message.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  // Returns a text that contains all that has to be the same on all ranks:
  // "bf16 above 1 MiB".
  virtual std::string ToString() const = 0;
  // Returns the bytes of the message for one rank's `numel` floating-point
  // numbers, or 0 if the numbers of all ranks are sent as they are. It depends
  // on these arguments alone. Messages follow each other, so that multiples of
  // 16 keep them aligned.
  virtual int64_t MessageBytes(int64_t numel, at::ScalarType dtype,
                               int world_size) const = 0;

  // Both run on the current stream, without grad. `label` names the unit.
  // Writes `message`, 1-D and uint8, for `numbers`, which are 1-D.
  virtual void Write(absl::string_view label, const at::Tensor& numbers,
                     const at::Tensor& message) = 0;
  // Writes `numbers` from `messages`. Both have a row for every rank.
  virtual void Read(absl::string_view label, const at::Tensor& messages,
                    const at::Tensor& numbers) = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZATION_LOG_H_
