// Describes one simulated run as plain data: what is trained, how, on which
// network and disk, and what goes wrong.
#ifndef TESTING_SIMULATION_SCENARIO_H_
#define TESTING_SIMULATION_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "fsdp/options/options.h"
#include "testing/simulation/network.h"

namespace fsdp::simulation {

enum class FaultKind {
  kKill,       // a rank is no more, and its peers notice
  kSilence,    // the same, and its peers do not notice
  kStop,       // a rank stands still for less than any deadline
  kLongStop,   // a rank stands still for longer than every deadline
  kSlow,       // ten times slower from then on
  kThrow,      // a rank's own code fails in forward
  kClockJump,  // all clocks on the wall jump, either way
  kLosePower,  // all ranks die at once, and what was not synced is lost
  kDiskFull,   // for one rank, until the end
  kDiskError,  // one call of one rank fails
  kSsdError,   // a read or write of a tier's file fails
  kSsdTorn,    // a part of it is written, and nobody says so
  kRot,        // a bit of the newest checkpoint turns for the attempt
  kSsdShort,   // a part of a tier's read or write is done, and said so
  // Only guarded runs have these (checkpoint/checkpointer.h).
  kSignal,     // a rank is told to stop
  kNotFinite,  // a rank's loss of a step is NaN
  kFinish,     // a rank returns after a step, as if its data had ended
};
inline constexpr int kNumFaultKinds = 14;  // that DrawScenario() draws
const char* ToString(FaultKind kind);

struct Fault {
  FaultKind kind = FaultKind::kKill;
  int rank = 0;
  // Number, from 0, of the rank's event at which it comes; for disks of its
  // change, for kThrow of its forward, for tiers' files of its request. For
  // kNotFinite and kFinish: the step, from 1, in or after which it comes.
  int64_t at = 0;
  absl::Duration duration = absl::ZeroDuration();  // for kStop and kClockJump
};

enum class Wrap { kBlocks, kWhole, kLinears };
enum class Optimizer { kSgd, kAdamW };

struct Training {
  int64_t dim = 4;
  int blocks = 2;
  int64_t rows = 2;  // per rank and backward
  int steps = 4;
  int backwards = 1;
  bool no_sync = false;
  bool bfloat16 = false;  // for computing; reduced in float32
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  int mesh_rows = 1;
  Wrap wrap = Wrap::kBlocks;
  PrefetchOptions prefetch;
  bool reshard_root = false;
  bool share_memory = true;
  bool check_order = true;
  double divide = 0;  // divides gradients; 0: the number of ranks
  Optimizer optimizer = Optimizer::kSgd;
  bool fused = false;

  // These say what rests in files of a simulated SSD or in the host's memory.
  bool rest_parameters = false;
  bool rest_gradients = false;
  bool rest_states = false;
  unsigned memory_kinds = 0;  // bit i: RestingKind i is in memory
  // Kinds that do not rest elsewhere have Tier::kCpu, which is the same for a
  // model on the CPU.
  bool cpu_tier = false;
  // Pages of memory in front of what rests; a unit's part of a kind takes one.
  // 0: as the library plans, which holds all of a small model.
  int buffer_pages = 0;
  bool rollback = false;
  int prefetch_distance = 2;

  int save_every = 0;  // steps; 0: never
  bool save_async = false;
  bool small_staging = false;   // less than is to be copied
  int keep_last = 0;            // 0: all
  bool moves_in_parts = false;  // the disk does; see DiskView
  bool is_guarded = false;      // by a RunGuard, which then saves
};

// A start of the ranks, and what happens to them.
struct Attempt {
  int world_size = 2;
  std::vector<Fault> faults;
  uint64_t power_seed = 0;  // decides what is lost with the power
};

struct Scenario {
  uint64_t seed = 0;
  Training training;
  NetworkOptions network;
  std::vector<Attempt> attempts;
};

// The scenario is the same on every machine.
Scenario DrawScenario(uint64_t seed, bool with_faults = true);

// Draws guarded ranks that are told to stop, lose a number or finish.
Scenario DrawGuarded(uint64_t seed);

// Returns the network of the seed's scenario.
NetworkOptions DrawNetwork(uint64_t seed);

// Writes one line per part, for people.
std::string ToString(const Scenario& scenario);

// Returns what it has, to be counted: "strategy FULL_SHARD", "3 ranks".
std::vector<std::string> FeaturesOf(const Scenario& scenario);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SCENARIO_H_
