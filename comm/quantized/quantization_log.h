// What quantised collectives have lost.
#ifndef COMM_QUANTIZED_QUANTIZATION_LOG_H_
#define COMM_QUANTIZED_QUANTIZATION_LOG_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/call.h"
#include "device_ops/block_quantization.h"

namespace fsdp::comm {

// By collective and label. Thread-safe, so that ranks may share one.
class QuantizationLog {
 public:
  struct Totals {
    int64_t count = 0;                    // of collectives
    device_ops::QuantizationError error;  // of all their numbers
  };

  void Add(Collective collective, absl::string_view label,
           const device_ops::QuantizationError& error);
  void Clear();

  Totals TotalsOf(Collective collective) const;
  Totals TotalsOf(Collective collective, absl::string_view label) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<std::pair<Collective, std::string>, Totals> totals_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_QUANTIZED_QUANTIZATION_LOG_H_
