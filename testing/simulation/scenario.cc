#include "testing/simulation/scenario.h"

#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fsdp::simulation {
namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};

// The engine is the same everywhere; standard distributions are not.
class Choices {
 public:
  explicit Choices(uint64_t seed) : random_(seed * 0x9E3779B97F4A7C15U + 1) {}

  int Int(int low, int high) {
    return low + static_cast<int>(random_() % uint64_t(high - low + 1));
  }
  bool Chance(int percent) { return Int(0, 99) < percent; }
  uint64_t Any() { return random_(); }
  // Returns small numbers as often as large ones.
  int64_t Event(int64_t most) {
    const double part = static_cast<double>(random_() >> 11) / 9007199254740992;
    return static_cast<int64_t>(std::pow(static_cast<double>(most), part)) - 1;
  }

 private:
  std::mt19937_64 random_;
};

bool IsHybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kHybridShard ||
         strategy == ShardingStrategy::kHybridShardGradOp;
}

void DrawModel(Choices& choices, int world_size, Training& t) {
  t.dim = choices.Int(1, 6);
  t.blocks = choices.Int(1, 3);
  t.rows = choices.Int(1, 3);
  t.steps = choices.Int(1, 5);
  if (choices.Chance(40)) t.backwards = choices.Int(2, 3);
  t.no_sync = t.backwards > 1 && choices.Chance(50);
  t.bfloat16 = choices.Chance(25);
  t.strategy = static_cast<ShardingStrategy>(choices.Int(0, 5));
  if (IsHybrid(t.strategy) && world_size % 2 == 1) {
    t.strategy = ShardingStrategy::kFullShard;
  }
  t.mesh_rows =
      IsHybrid(t.strategy) ? (choices.Chance(50) ? 2 : world_size / 2) : 1;
  if (t.mesh_rows < 2 && IsHybrid(t.strategy)) t.mesh_rows = 2;
  t.wrap = static_cast<Wrap>(choices.Chance(60) ? 0 : choices.Int(0, 2));
}

void DrawOptionsOf(Choices& choices, Training& t) {
  t.prefetch.forward = choices.Chance(70);
  t.prefetch.backward = choices.Chance(70);
  t.reshard_root = choices.Chance(30);
  t.share_memory = choices.Chance(80);
  t.check_order = choices.Chance(80);
  constexpr double kDivisors[] = {0, 0, 1, 2, 4};
  t.divide = kDivisors[choices.Int(0, 4)];
  t.optimizer = static_cast<Optimizer>(choices.Int(0, 1));
  t.fused = choices.Chance(40);
  // Sums of several backwards' scaled sums round otherwise unless it is exact.
  if (t.backwards > 1 && t.divide == 0) t.divide = 2;
}

void DrawRest(Choices& choices, Training& t) {
  if (!choices.Chance(30)) return;
  t.rest_parameters = choices.Chance(60);
  t.rest_gradients = choices.Chance(40);
  t.rest_states = choices.Chance(60);
  if (!t.rest_parameters && !t.rest_gradients && !t.rest_states) return;
  t.fused = true;
  t.rollback = choices.Chance(50);
  choices.Chance(70);  // once decided something, and seeds stay what they were
  t.prefetch_distance = choices.Int(0, 3);
}

void DrawSaves(Choices& choices, Training& t) {
  if (!choices.Chance(60)) return;
  t.save_every = choices.Int(1, 2);
  t.save_async = choices.Chance(50);
  t.small_staging = choices.Chance(30);
  if (choices.Chance(40)) t.keep_last = choices.Int(1, 2);
}

// Has its own choices, so that the seed's other draws do not depend on these.
void DrawPlaces(Choices choices, Training& t) {
  if (choices.Chance(50)) t.memory_kinds = choices.Int(1, 7);
  t.cpu_tier = t.fused && choices.Chance(30);
  // Buffers that are needed at once: one unit is written while the next is
  // read, two gradients are summed at a time, and a step has two states and
  // what it may have to undo.
  const int least = (t.rest_parameters ? 2 : 0) + (t.rest_gradients ? 2 : 0) +
                    (t.rest_states ? 3 : 0);
  if (choices.Chance(75)) t.buffer_pages = least + choices.Int(0, 2);
  t.moves_in_parts = t.save_every > 0 && choices.Chance(30);
}

Fault DrawFault(Choices& choices, const Training& t, int world_size,
                bool is_first) {
  Fault fault;
  const bool rests = t.rest_parameters || t.rest_gradients || t.rest_states;
  if (rests && choices.Chance(30)) {
    constexpr FaultKind kOfSsds[] = {FaultKind::kSsdError, FaultKind::kSsdTorn,
                                     FaultKind::kSsdShort};
    fault.kind = kOfSsds[choices.Int(0, 2)];
  } else {
    fault.kind =
        static_cast<FaultKind>(choices.Int(0, t.save_every > 0 ? 9 : 7));
  }
  // Saves are for losses of power.
  const bool loses_power = t.save_every > 0 && choices.Chance(35);
  if (loses_power) fault.kind = FaultKind::kLosePower;
  if (t.save_every > 0 && !is_first && choices.Chance(40)) {
    fault.kind = FaultKind::kRot;
  }
  fault.rank = choices.Int(0, world_size - 1);
  switch (fault.kind) {
    case FaultKind::kStop:
      fault.duration = absl::Milliseconds(choices.Int(1, 8000));
      break;
    case FaultKind::kLongStop:
      fault.duration = absl::Hours(1);
      break;
    case FaultKind::kClockJump:
      fault.duration = absl::Seconds(choices.Int(-100, 100));
      break;
    default:
      break;
  }
  switch (fault.kind) {
    case FaultKind::kThrow:
      fault.at = choices.Event(int64_t{2} * t.steps * t.backwards);
      break;
    case FaultKind::kDiskFull:
    case FaultKind::kDiskError:
    case FaultKind::kSsdError:
    case FaultKind::kSsdTorn:
    case FaultKind::kSsdShort:
      fault.at = choices.Event(80);
      break;
    case FaultKind::kRot:
      fault.at = choices.Int(0, 100'000);
      break;
    default:
      fault.at = loses_power || choices.Chance(50) ? choices.Int(0, 700)
                                                   : choices.Event(1000);
  }
  return fault;
}

}  // namespace

const char* ToString(FaultKind kind) {
  constexpr const char* kNames[] = {
      "kill",       "silence",    "stop",       "long stop", "slow",
      "throw",      "clock jump", "lose power", "disk full", "disk error",
      "ssd error",  "ssd torn",   "rot",        "ssd short", "signal",
      "not finite", "finish"};
  return kNames[static_cast<int>(kind)];
}

NetworkOptions DrawNetwork(uint64_t seed) {
  Choices choices(~seed);
  NetworkOptions n;
  n.moves = static_cast<Moves>(choices.Int(0, 2));
  n.slowest = absl::Microseconds(choices.Chance(50) ? 1000 : 50'000);
  if (choices.Chance(30)) n.lost_per_mille = 20;
  n.has_common_memory = choices.Chance(50);
  n.late_visibility = choices.Chance(60);
  n.prefers_scaled_inputs = choices.Chance(20);
  n.scales_itself = choices.Chance(60);
  n.symmetric_is_collective = choices.Chance(30);
  n.overwrites_inputs = choices.Chance(50);
  n.root_ends_early = choices.Chance(50);
  return n;
}

Scenario DrawScenario(uint64_t seed, bool with_faults) {
  Choices choices(seed);
  Scenario scenario;
  scenario.seed = seed;
  const int world_size = kWorldSizes[choices.Int(0, 4)];
  Training& t = scenario.training;
  DrawModel(choices, world_size, t);
  DrawOptionsOf(choices, t);
  DrawRest(choices, t);
  DrawSaves(choices, t);
  DrawPlaces(Choices(~seed * 3), t);
  scenario.network = DrawNetwork(seed);
  const int failing = with_faults && choices.Chance(75) ? choices.Int(1, 2) : 0;
  for (int i = 0; i <= failing; ++i) {
    Attempt& attempt = scenario.attempts.emplace_back();
    attempt.world_size = world_size;
    // Without saves each attempt begins anew.
    const bool may_change = i > 0 && !IsHybrid(t.strategy);
    if (may_change && choices.Chance(30)) {
      attempt.world_size = kWorldSizes[choices.Int(0, 4)];
    }
    attempt.power_seed = choices.Any();
    if (i == failing) continue;
    const int count = choices.Chance(80) ? 1 : 2;
    for (int k = 0; k < count; ++k) {
      attempt.faults.push_back(
          DrawFault(choices, t, attempt.world_size, i == 0));
    }
  }
  return scenario;
}

Scenario DrawGuarded(uint64_t seed) {
  Scenario scenario = DrawScenario(seed, /*with_faults=*/false);
  Training& t = scenario.training;
  t.is_guarded = true;
  Choices choices(~seed * 5);
  const int before = choices.Int(1, 2);
  for (int i = 0; i < before; ++i) {
    Attempt attempt = scenario.attempts.back();
    constexpr FaultKind kKinds[] = {FaultKind::kSignal, FaultKind::kNotFinite,
                                    FaultKind::kFinish};
    Fault fault;
    // A rank that is alone cannot end before others.
    fault.kind = kKinds[choices.Int(0, attempt.world_size > 1 ? 2 : 1)];
    fault.rank = choices.Int(0, attempt.world_size - 1);
    fault.at = fault.kind == FaultKind::kSignal ? choices.Int(0, 250)
                                                : choices.Int(1, t.steps);
    attempt.faults.push_back(fault);
    scenario.attempts.insert(scenario.attempts.begin(), attempt);
  }
  return scenario;
}

std::vector<std::string> FeaturesOf(const Scenario& scenario) {
  const Training& t = scenario.training;
  const NetworkOptions& n = scenario.network;
  constexpr const char* kWraps[] = {"blocks", "whole", "linears"};
  constexpr const char* kMoves[] = {"at start", "at end", "any time"};
  std::vector<std::string> features = {
      absl::StrCat("ranks ", scenario.attempts[0].world_size),
      absl::StrCat("strategy ", ToString(t.strategy)),
      absl::StrCat("wrap ", kWraps[static_cast<int>(t.wrap)]),
      absl::StrCat("moves ", kMoves[static_cast<int>(n.moves)]),
      absl::StrCat("optimizer ",
                   t.optimizer == Optimizer::kSgd ? "SGD" : "AdamW",
                   t.fused ? ", fused" : "")};
  const auto add = [&](bool has, const std::string& name) {
    if (has) features.push_back(name);
  };
  add(t.backwards > 1, t.no_sync ? "accumulation, no sync" : "accumulation");
  add(t.bfloat16, "bfloat16");
  add(!t.prefetch.forward, "no forward prefetch");
  add(!t.prefetch.backward, "no backward prefetch");
  add(t.reshard_root, "root resharded");
  add(t.divide != 0, "divisor");
  add(!t.check_order, "order unchecked");
  add(n.has_common_memory && t.share_memory,
      n.late_visibility ? "common memory, seen late" : "common memory");
  add(n.prefers_scaled_inputs, "inputs scaled before");
  add(!n.scales_itself, "sums scaled after");
  add(n.symmetric_is_collective, "symmetric memory collective");
  add(n.overwrites_inputs, "inputs overwritten");
  add(n.root_ends_early, "roots end early");
  add(n.lost_per_mille > 0, "messages lost");
  add(t.rest_parameters, "parameters rest");
  add(t.rest_gradients, "gradients rest");
  add(t.rest_states, "states rest");
  const unsigned rests = (t.rest_parameters ? 1U : 0U) |
                         (t.rest_gradients ? 2U : 0U) |
                         (t.rest_states ? 4U : 0U);
  add((rests & t.memory_kinds) != 0, "rests in host memory");
  add((rests & ~t.memory_kinds) != 0, "rests in files");
  add(t.cpu_tier && rests != 7, "CPU tier");
  add(rests != 0 && t.buffer_pages > 0, "little memory");
  add(t.moves_in_parts, "disk moves in parts");
  add(t.rollback, "rollback");
  add(t.save_every > 0, t.save_async ? "saves beside" : "saves");
  add(t.save_async && t.small_staging, "small staging");
  add(t.keep_last > 0, "old checkpoints removed");
  for (size_t i = 1; i < scenario.attempts.size(); ++i) {
    add(scenario.attempts[i].world_size != scenario.attempts[0].world_size,
        "another number of ranks");
  }
  return features;
}

std::string ToString(const Scenario& scenario) {
  const Training& t = scenario.training;
  std::string text = absl::StrCat(
      "seed ", scenario.seed, ": ", absl::StrJoin(FeaturesOf(scenario), "; "),
      "\n  dim ", t.dim, ", ", t.blocks, " blocks, ", t.rows, " rows, ",
      t.steps, " steps of ", t.backwards, " backwards, divisor ", t.divide,
      ", mesh of ", t.mesh_rows, " rows, a save every ", t.save_every,
      " steps, ", t.keep_last, " kept");
  for (const Attempt& attempt : scenario.attempts) {
    absl::StrAppend(&text, "\n  ", attempt.world_size, " ranks");
    for (const Fault& fault : attempt.faults) {
      absl::StrAppend(&text, ", ", ToString(fault.kind), " of rank ",
                      fault.rank, " at ", fault.at);
      if (fault.duration != absl::ZeroDuration()) {
        absl::StrAppend(&text, " for ", absl::FormatDuration(fault.duration));
      }
    }
  }
  return text;
}

}  // namespace fsdp::simulation
