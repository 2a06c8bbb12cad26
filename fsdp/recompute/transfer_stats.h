// Counts of what goes to a store and comes back.
#ifndef FSDP_RECOMPUTE_TRANSFER_STATS_H_
#define FSDP_RECOMPUTE_TRANSFER_STATS_H_

#include <cstdint>

namespace fsdp {

struct TensorTransferStats {
  int64_t tensors_out = 0;  // written well
  int64_t bytes_out = 0;
  int64_t bytes_in = 0;
  int64_t full = 0;    // writes that the store had no room for
  int64_t failed = 0;  // writes and erasures that failed otherwise
  double waited_seconds = 0;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_TRANSFER_STATS_H_
