// The costs of a training step: seconds of compute, of memory traffic and of
// collectives. This is arithmetic alone; nothing is measured.
#ifndef PLANNER_SIMULATOR_COST_MODEL_H_
#define PLANNER_SIMULATOR_COST_MODEL_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace fsdp::simulator {

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

// A message takes latency + bytes / bandwidth. The bandwidth may be infinite.
struct Link {
  double latency = 0;           // seconds
  double bandwidth = 0;         // bytes per second, each way
  double reduce_bandwidth = 0;  // for reductions; 0: the same
};

// `size` ranks, each `stride` after the one before it.
struct Group {
  int size = 1;
  int stride = 1;
};

// The compute of a unit in one forward or one backward.
struct Work {
  double flops = 0;
  double seconds = 0;  // added to the time of the flops
};

struct CostOptions {
  double flops_per_second = 0;  // that a rank reaches
  // Bytes read plus bytes written per second: a copy of n bytes counts 2n.
  double memory_bandwidth = 0;

  int ranks_per_host = 0;  // 0: all
  Link host;               // of a rank, to the others of its host
  Link network;            // of a whole host, which its ranks share

  // Ranks of a host read each other's memory: between them an all-gather costs
  // a fence, and a reduction the reading and a fence.
  bool shared_memory = false;
  double fence_seconds = 0;

  // Collectives run beside compute. Otherwise the thread that starts one is
  // busy until it is done.
  bool overlap = true;
};

class CostModel {
 public:
  // InvalidArgument: there are no ranks, a rate is not positive, or a time or a
  // number is negative.
  static absl::StatusOr<CostModel> Create(const CostOptions& options,
                                          int ranks);

  const CostOptions& options() const { return options_; }

  double ComputeSeconds(const Work& work) const;
  // `bytes` counts those read and those written.
  double MemorySeconds(double bytes) const;

  // Returns the seconds of a collective that every group like this one runs at
  // once: a ring between hosts, and then one on each host. `bytes` are of all
  // ranks' pieces together: the buffer that an all-gather fills, a
  // reduce-scatter reads and an all-reduce changes. 0 for a group of one or 0
  // bytes.
  double CollectiveSeconds(Collective collective, const Group& group,
                           int64_t bytes) const;

  // Returns the bytes that a rank sends; with shared memory only those to other
  // hosts. An all-reduce is a reduce-scatter and an all-gather of equal pieces.
  int64_t BytesSent(Collective collective, const Group& group,
                    int64_t bytes) const;

 private:
  explicit CostModel(const CostOptions& options) : options_(options) {}

  int RanksOnHost(const Group& group) const;
  // Returns on how many hosts a group is, whose last may have fewer ranks.
  int HostsOf(const Group& group) const;
  // `piece` is the bytes that every rank sends to every other.
  double ExchangeSeconds(const Group& group, double piece, bool reduces) const;

  CostOptions options_;  // with 1 to all ranks per host
};

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_COST_MODEL_H_
