// What the parts of a training step cost: seconds of compute, of memory traffic
// and of collectives. Arithmetic alone: nothing is measured here.
#ifndef PLANNER_SIMULATOR_COST_MODEL_H_
#define PLANNER_SIMULATOR_COST_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::simulator {

enum class Collective { kAllGather, kReduceScatter, kAllReduce };

// How ranks pass each other n pieces.
enum class Algorithm {
  kRing,          // one ring of all ranks, as fast as its slowest link
  kHierarchical,  // a ring on each level, one level after the other
  kRecursive,     // the same with the latency of recursive doubling
};

// One level of the network: the ranks of a host, the hosts of a cluster. A
// message between two members of a level takes latency + bytes / bandwidth. The
// bandwidth is a member's: at the lowest level a rank's, above it that of the
// whole host, whose ranks share it. It may be infinite.
struct NetworkLevel {
  int members = 0;     // of the level below; 0, for the last level: any number
  double latency = 0;  // seconds
  double bandwidth = 0;         // bytes per second, each way
  double reduce_bandwidth = 0;  // where sums are made on the way; 0: the same
};

// `size` ranks, each `stride` after the one before.
struct Group {
  int size = 1;
  int stride = 1;
};

// Compute of a unit for one backward or forward.
struct Work {
  double flops = 0;
  double seconds = 0;  // added to those of the flops
};

struct CostOptions {
  double flops_per_second = 0;  // that a rank reaches on its own

  // Bytes read plus bytes written per second: a copy of n bytes is 2n.
  double memory_bandwidth = 0;       // of a rank on its own
  double host_memory_bandwidth = 0;  // that a host's ranks share; 0: no limit
  double optimizer_bandwidth = 0;    // 0: memory_bandwidth

  std::vector<NetworkLevel> levels;  // the lowest first
  Algorithm algorithm = Algorithm::kHierarchical;

  // Ranks of a host read each other's memory: between them an all-gather costs
  // a fence, and a reduction the reading and a fence.
  bool shared_memory = false;
  double fence_seconds = 0;

  // Collectives run beside compute. Otherwise the thread that starts one is
  // busy with it until it is done.
  bool overlap = true;

  // Ranks of a host share this many cores, each using `threads`; 0: every rank
  // has a device of its own.
  double cores = 0;
  double threads = 1;
};

class CostModel {
 public:
  // For `ranks` > 0. InvalidArgument: rates that are not positive, negative
  // times, levels that do not hold the ranks, a ring of shared memory.
  static absl::StatusOr<CostModel> Create(CostOptions options, int ranks);

  const CostOptions& options() const { return options_; }
  int ranks_per_host() const { return ranks_per_host_; }
  // How many times longer compute takes because a host's ranks share its cores.
  double stretch() const { return stretch_; }
  // Ranks of `group` on one host.
  int RanksOnHost(const Group& group) const;

  double ComputeSeconds(const Work& work) const;
  // `bytes` read and written, together.
  double CopySeconds(double bytes) const;
  double OptimizerSeconds(double bytes) const;

  // `bytes` of all ranks' pieces together: of the buffer that an all-gather
  // fills, a reduce-scatter reads and an all-reduce changes. Every group like
  // this one runs it at the same time. Nothing for a group of one or 0 bytes.
  double CollectiveSeconds(Collective collective, const Group& group,
                           int64_t bytes) const;

  // What a rank sends in it; in shared memory what it sends to other hosts. An
  // all-reduce is a reduce-scatter and an all-gather of equal pieces.
  int64_t BytesSent(Collective collective, const Group& group,
                    int64_t bytes) const;

 private:
  CostModel(CostOptions options, int ranks);

  // `piece` bytes from every rank to every other.
  double ExchangeSeconds(const Group& group, double piece, bool reduces) const;
  double RingSeconds(const Group& group, double piece, bool reduces) const;
  double SharedMemorySeconds(const Group& group, double piece,
                             bool reduces) const;
  // Ranks of `group` in one member of `level`; a member of level 0 is a rank.
  int RanksInMember(const Group& group, int level) const;

  CostOptions options_;
  int ranks_per_host_;
  double stretch_;
  double copy_bandwidth_;
  double optimizer_bandwidth_;
  std::vector<int> below_;  // per level, ranks in one of its members; and all
};

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_COST_MODEL_H_
