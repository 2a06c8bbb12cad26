// The costs of a training step: seconds of compute, of memory traffic and of
// collectives. This is arithmetic alone; nothing is measured.
#ifndef PLANNER_SIMULATOR_COST_MODEL_H_
#define PLANNER_SIMULATOR_COST_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::simulator {

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

// How the ranks of a group exchange their pieces.
enum class Algorithm {
  kRing,          // one ring of all ranks, as fast as its slowest link
  kHierarchical,  // a ring on each level, one level after the other
  kRecursive,     // likewise, with the latency of recursive doubling
};

// One level of the network: the ranks of a host, the hosts of a cluster. A
// message between two members takes latency + bytes / bandwidth. The bandwidth,
// which may be infinite, is a member's: at the lowest level a rank's, above it
// a whole host's, which its ranks share.
struct NetworkLevel {
  int members = 0;       // units of the level below; 0 in the last level: any
  double latency = 0;    // seconds
  double bandwidth = 0;  // bytes per second, each way
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
  double flops_per_second = 0;  // that a rank reaches on its own

  // Bytes read plus bytes written per second: a copy of n bytes counts 2n.
  double memory_bandwidth = 0;       // of a rank on its own
  double host_memory_bandwidth = 0;  // that a host's ranks share; 0: no limit
  double optimizer_bandwidth = 0;    // of the optimizer; 0: memory_bandwidth

  std::vector<NetworkLevel> levels;  // the lowest first
  Algorithm algorithm = Algorithm::kHierarchical;

  // Ranks of a host read each other's memory: between them an all-gather costs
  // a fence, and a reduction the reading and a fence.
  bool shared_memory = false;
  double fence_seconds = 0;

  // Collectives run beside compute. Otherwise the thread that starts one is
  // busy until it is done.
  bool overlap = true;

  // The ranks of a host share this many cores, each using `threads`; 0: every
  // rank has its own device.
  double cores = 0;
  double threads = 1;
};

class CostModel {
 public:
  // `ranks` > 0. InvalidArgument: a rate is not positive, a time is negative,
  // the levels do not hold the ranks, or a ring is to use shared memory.
  static absl::StatusOr<CostModel> Create(CostOptions options, int ranks);

  const CostOptions& options() const { return options_; }
  // Returns how many ranks of `group` are on one host.
  int RanksOnHost(const Group& group) const;

  double ComputeSeconds(const Work& work) const;
  // `bytes` counts those read and those written.
  double CopySeconds(double bytes) const;
  double OptimizerSeconds(double bytes) const;

  // Returns the seconds of a collective that every group like this one runs at
  // once. `bytes` are of all ranks' pieces together: the buffer that an
  // all-gather fills, a reduce-scatter reads and an all-reduce changes. 0 for a
  // group of one or 0 bytes.
  double CollectiveSeconds(Collective collective, const Group& group,
                           int64_t bytes) const;

  // Returns the bytes that a rank sends; with shared memory only those to other
  // hosts. An all-reduce is a reduce-scatter and an all-gather of equal pieces.
  int64_t BytesSent(Collective collective, const Group& group,
                    int64_t bytes) const;

 private:
  CostModel(CostOptions options, int ranks);

  // `piece` is the bytes that every rank sends to every other.
  double ExchangeSeconds(const Group& group, double piece, bool reduces) const;
  // Returns how many ranks of `group` are in one member of `level`; a member of
  // level 0 is a rank.
  int RanksInMember(const Group& group, int level) const;

  CostOptions options_;
  // How many times longer compute takes because a host's ranks share its cores.
  double stretch_;
  double copy_bandwidth_;
  double optimizer_bandwidth_;
  std::vector<int> below_;  // by level: ranks in one of its members; then all
};

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_COST_MODEL_H_
