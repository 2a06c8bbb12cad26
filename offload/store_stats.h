// What every store that gives out extents tells of itself.
#ifndef OFFLOAD_STORE_STATS_H_
#define OFFLOAD_STORE_STATS_H_

#include "offload/extents.h"
#include "offload/param_store.h"
#include "offload/transfer_meter.h"

namespace fsdp::offload {

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

#endif  // OFFLOAD_STORE_STATS_H_
