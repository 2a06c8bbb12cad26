// Tells what a training step costs, before there is one: the library's own
// schedule of a model of given sizes runs against a clock.
#ifndef PLANNER_SIMULATOR_SIMULATOR_H_
#define PLANNER_SIMULATOR_SIMULATOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "flat_param/layout.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp::simulator {

// --- Costs ------------------------------------------------------------------
// Seconds of compute, of memory traffic and of collectives, by arithmetic
// alone.

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

// --- The model --------------------------------------------------------------

// The compute of a unit itself, without the units inside. In forward it comes
// after them and in backward before, except for the part `share_before`.
struct UnitWork {
  Work forward;
  Work backward;
  double share_before = 0;
};

struct UnitShape : UnitWork {
  std::string name;
  int parent = -1;  // index of the surrounding unit; -1 for the root, unit 0
  std::vector<flat_param::ParameterSpec> parameters;
};

struct ModelShape {
  std::vector<UnitShape> units;  // parents before children, the root first

  int64_t num_elements() const;
};

// Returns a contiguous parameter of these sizes.
flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes);

// The model of testing/gpt: one unit per block, and the root.
struct GptShape {
  int64_t layers = 32;
  int64_t dim = 4096;
  int64_t vocab = 32000;
  int64_t seq = 2048;
  int64_t batch = 1;  // rows per rank and backward
  // Blocks keep only their inputs, and backward recomputes them.
  bool recompute = false;
};

// Counts matrix products, those of causal attention in full, and twice as much
// for backward. InvalidArgument: a number is below 1 (layers: below 0), or the
// units do not fit 64 bits.
absl::StatusOr<ModelShape> MakeGpt(const GptShape& gpt);

// Shards a model's units over a number of ranks: what the schedule and the
// memory plan need to know of them, and the sizes of their collectives. The
// arithmetic is the library's, padding included, without tensors.

// ShardingStrategy of fsdp/options/options.h. Hybrid strategies have fewer
// `shard_ranks` than ranks.
enum class Strategy {
  kFull,        // whole while a unit computes
  kGradients,   // whole from forward to backward
  kOptimizer,   // whole until a backward synchronizes
  kReplicated,  // always whole
};

struct ShardingOptions {
  int ranks = 1;
  int shard_ranks = 0;  // ranks that share one copy; 0: all
  Strategy strategy = Strategy::kFull;
  bool reshard_root = false;    // with kFull, the root too
  int backward_group_size = 0;  // UnitOptions::backward_group_size
  // Bytes per element of parameters at rest, gathered, and reduced.
  int stored_bytes = 4;
  int compute_bytes = 4;
  int reduce_bytes = 4;
};

// Bytes of a unit's collectives, over all ranks of the group.
struct UnitMessages {
  int64_t gather = 0;
  int64_t reduce = 0;   // the segments of all ranks
  int64_t segment = 0;  // of one rank: all-reduced over copies
  // Bytes of gradients, in the dtype they are computed in, without padding.
  int64_t gradients = 0;
};

struct ShardedShape {
  int ranks = 1;
  bool casts = false;  // computes in another dtype than it stores
  Group shard;         // consecutive ranks
  Group replicate;     // size 1: there is one copy
  Group part;          // gathers for backward; size 0: the shard group does
  // One entry per unit of the model.
  std::vector<ScheduledUnit> units;
  std::vector<UnitBytes> bytes;
  std::vector<UnitMessages> messages;
  std::vector<UnitWork> work;
};

// `options` have ranks. InvalidArgument: shard_ranks or backward_group_size do
// not divide; options contradict each other; or FlatLayout refuses a unit.
absl::StatusOr<ShardedShape> Shard(const ModelShape& model,
                                   const ShardingOptions& options);

// --- The step ---------------------------------------------------------------

// The most bytes of optimizer state per byte of parameters that make sense.
inline constexpr double kMostState = 1e6;

struct StepOptions {
  ScheduleOptions schedule;
  // Backwards and optimizer state of a step.
  MemoryPlanOptions memory;
};

// Seconds and bytes of a step on one rank.
struct Spent {
  double compute = 0;
  double copies = 0;
  double optimizer = 0;
  // The time that compute waits for gathers, and for reductions, those over
  // copies included.
  double exposed_gather = 0;
  double exposed_reduce = 0;
  // Bytes that the rank sends.
  int64_t gathered_bytes = 0;
  int64_t reduced_bytes = 0;
  int64_t replicated_bytes = 0;

  double exposed() const { return exposed_gather + exposed_reduce; }
  int64_t bytes() const {
    return gathered_bytes + reduced_bytes + replicated_bytes;
  }
};

struct StepResult {
  int ranks = 1;
  int copies = 1;      // of the model: all ranks over those that share a copy
  double seconds = 0;  // compute, copies, optimizer and exposed together
  Spent total;
  MemoryPlan peak;  // the most bytes alive, of each kind
};

// Simulates the second step of a training: the first one records the order by
// which later ones prefetch. InvalidArgument: a number in `options` is too
// small, or the optimizer state is negative.
absl::StatusOr<StepResult> SimulateStep(const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options);

// Everything on which a simulated step depends.

struct Scenario {
  ModelShape model;
  ShardingOptions sharding;
  CostOptions costs;
  StepOptions step;
};

// InvalidArgument: one of the parts is refused.
absl::StatusOr<StepResult> Simulate(const Scenario& scenario);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_SIMULATOR_H_
