// Counts transfers, and the time during which there are any.
#ifndef OFFLOAD_TRANSFER_METER_H_
#define OFFLOAD_TRANSFER_METER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "offload/extents.h"
#include "offload/param_store.h"

namespace fsdp::offload {

// Thread-compatible.
class TransferMeter {
 public:
  void Start(absl::Time now) {
    if (running_++ == 0) since_ = now;
  }

  void Finish(absl::Time now, bool well, int64_t bytes) {
    if (--running_ == 0) {
      stats_.busy_seconds += absl::ToDoubleSeconds(now - since_);
    }
    if (!well) return;
    ++stats_.operations;
    stats_.bytes += bytes;
  }

  // Counts transfers that are over.
  const TransferStats& stats() const { return stats_; }

 private:
  int64_t running_ = 0;
  absl::Time since_;
  TransferStats stats_;
};

// Returns the statistics of a store that gives out extents.

inline StoreStats StatsOf(const TransferMeter& reads,
                          const TransferMeter& writes, const Extents& extents) {
  StoreStats stats;
  stats.reads = reads.stats();
  stats.writes = writes.stats();
  stats.capacity_bytes = extents.capacity();
  stats.used_bytes = extents.used();
  stats.peak_used_bytes = extents.peak_used();
  return stats;
}

}  // namespace fsdp::offload

#endif  // OFFLOAD_TRANSFER_METER_H_
