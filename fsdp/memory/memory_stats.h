// How much memory a rank uses beside its shards, as numbers.
#ifndef FSDP_MEMORY_MEMORY_STATS_H_
#define FSDP_MEMORY_MEMORY_STATS_H_

#include <cstdint>

namespace fsdp {

struct PoolStats {
  int64_t in_use_bytes = 0;       // handed out at present
  int64_t peak_in_use_bytes = 0;  // most handed out at once
  int64_t reserved_bytes = 0;     // allocated, handed out or not
  int64_t allocations = 0;        // in all, without discarded buffers
};

// Memory of one rank, without shards: `parameters` is what parameters are
// gathered into, `gradients` is reduce buffers.
struct MemoryStats {
  PoolStats parameters;
  PoolStats gradients;
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_MEMORY_STATS_H_
