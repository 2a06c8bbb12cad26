#include <algorithm>

#include "fsdp/testing/program/program.h"

namespace fsdp::testing {
namespace {

bool Calls(const Program& p, int call) {
  return std::any_of(p.steps.begin(), p.steps.begin() + p.num_steps,
                     [call](const ProgramStep& step) {
                       return step.before[0] == call || step.before[1] == call;
                     });
}

bool HasStyle(const Program& p, int style) {
  return std::any_of(
      p.steps.begin(), p.steps.begin() + p.num_steps,
      [style](const ProgramStep& step) { return step.style == style; });
}

template <typename Predicate>
bool AnyUnit(const Program& p, Predicate predicate) {
  return std::any_of(p.units.begin(), p.units.begin() + p.num_units, predicate);
}

void MakeGroupValid(Program& p) {
  p.late = std::min(p.late, p.ranks);
  if (p.late == 0) p.yields = 2;
  for (int* count : {&p.rows, &p.hosts}) {
    if (*count == 1 && p.ranks % 2 != 0) *count = 0;
    if (p.ranks == 1) *count = 0;
  }
  if (p.group != kSharedHosts && p.group != kLocalHosts) p.hosts = 0;
  if (p.rows == 0 && p.strategy >= 4) p.strategy -= 4;
  for (ProgramUnit& unit : p.units) {
    if (p.rows == 0 && unit.strategy >= 5) unit.strategy -= 4;
  }
}

// Returns whether the unit owns something, its calls are seen, and it does not
// write its arguments.
bool CanRecompute(const Program& p, const ProgramUnit& unit) {
  return CallsByForward(p) && !p.no_wrap && !p.wrap_linear &&
         p.precision <= kComputeFloat && !unit.writes_input;
}

void MakeModelValid(Program& p) {
  if (p.bare) p.tied = kUntied;
  if (p.no_wrap || !p.transparent) p.wrap_linear = 0;
  const bool quantizes = p.quantize_gather || p.quantize_reduce;
  const bool fails = HasStyle(p, kFailedBackward);
  const bool reuses = ReusesParameters(p);
  for (ProgramUnit& unit : p.units) {
    if (quantizes) unit.layer_norm = unit.batch_norm = 0;
    // It magnifies what int8 rounds, until two losses have nothing in common.
    if (quantizes && unit.outputs >= kViewOutput) unit.outputs = kOneOutput;
    // It magnifies the differences of sums in half precision.
    if (p.precision > kComputeFloat && reuses) unit.layer_norm = 0;
    if (p.precision >= kComputeFloat) unit.batch_norm = 0;
    // It turns two numbers into 1 and -1, so that its gradients are roundings
    // alone.
    if (p.dim <= 2) unit.layer_norm = 0;
    if (unit.hook != kNoHook && (unit.twice || unit.frozen)) {
      unit.hook = kNoHook;
    }
    // All ranks must use the same units, and here each layer is a unit.
    if (p.wrap_linear) unit.sometimes = 0;
    // If the first output is the child's, only the gradient of the second
    // enters the unit before the child.
    const bool needs_all_outputs =
        p.wrap_linear || (p.transparent && unit.child);
    if (needs_all_outputs && unit.outputs == kSometimesOutput) {
      unit.outputs = kOneOutput;
    }
    // Ranks fail at one place, at which they must have gathered the same units.
    if (fails && unit.outputs == kSometimesOutput) unit.outputs = kOneOutput;
    // A failed backward leaves zeros, which count for an optimizer that decays:
    // the result depends on where the backward has failed, unless the step's
    // own backward reaches the same parameters.
    if (fails && p.zero % 2 == 1) {
      unit.sometimes = unit.skipped_in = 0;
      if (p.micro == 1) unit.skipped_micro = 0;
    }
    // Dividing by the maximum of a gradient magnifies its rounding.
    if (p.precision > kComputeFloat) unit.hook = kNoHook;
    // Sums of several gradients round in the order of the graph.
    if (p.precision > kComputeFloat) {
      unit.outputs = kOneOutput;
      unit.checkpoint = unit.writes_input = 0;
    }
    if (unit.hook == kHookBefore && p.deferred) unit.hook = kHookAfter;
    unit.skipped_in = std::min(unit.skipped_in, p.num_steps);
    unit.skipped_micro = std::min(unit.skipped_micro, p.micro);
    if (!CanRecompute(p, unit)) unit.recompute = 0;
  }
}

// A region's arguments must not be written, its results not by their callers.
void MakeRegionsValid(Program& p) {
  const auto writes = [](const ProgramUnit& unit) {
    return unit.writes_input || unit.outputs == kViewOutput ||
           unit.outputs == kWrittenOutput;
  };
  if (p.precision > kComputeFloat || AnyUnit(p, writes)) p.regions = kNoRegions;
}

void MakeRestValid(Program& p) {
  if (!p.fused) p.rest_parameters = p.rest_gradients = p.rest_states = 0;
  const bool rests = p.rest_parameters || p.rest_gradients || p.rest_states;
  if (!rests) {
    p.budget = p.keep = p.big_blocks = 0;
    p.rollback = 1;
    p.distance = 2;
  }
  if (!p.rest_parameters || !p.rest_states || p.budget) p.keep = 0;
  if (p.keep) p.two_optimizers = p.in_backward = 0;
  if (!RecomputesRegions(p)) p.offload_activations = 0;
}

// Takes back optimizers that divide by what small gradients leave, which
// magnifies the rounding of sums. In double precision, or if both models round
// alike, that does not matter.
void MakeRoundingValid(Program& p) {
  const bool rounds_otherwise = p.precision == kFloat || !p.exact_reduce ||
                                p.low_precision_gradients ||
                                (p.precision > kFloat && ReusesParameters(p));
  if (rounds_otherwise && p.optimizer > kAdam) p.optimizer = kSgd;
  // Gradients of what is added before a mean is subtracted are roundings alone.
  const bool has_idle_parameters =
      AnyUnit(p, [](const ProgramUnit& unit) { return unit.batch_norm; });
  if (rounds_otherwise && has_idle_parameters) p.optimizer = kSgd;
  if (rounds_otherwise && p.precision > kComputeFloat) p.optimizer = kSgd;
}

void MakeOptimizerValid(Program& p) {
  if (p.precision <= kFloat) p.exact_reduce = 1;
  if (p.precision != kComputeFloat || p.fused) p.low_precision_gradients = 0;
  MakeRoundingValid(p);
  if (p.optimizer > kAdam) p.fused = 0;
  if (p.micro > 1 && !p.no_sync) p.in_backward = 0;
  if (p.in_backward) p.clip = p.scaler = p.halve_gradients = 0;
  if (p.clip == 0) p.norm = 2;
  if (p.scaler) p.divide = 0;
  if (!p.scaler) p.infinite_in = 0;
  p.infinite_in = std::min(p.infinite_in, p.num_steps);
  if (p.optimizer != kSgd || p.ranks == 1 || p.scaler || p.clip) {
    p.quantize_gather = p.quantize_reduce = 0;
  }
  if (p.quantize_gather || p.quantize_reduce) p.momentum = 0;
  if (!p.momentum) p.nesterov = 0;
  if (p.micro == 1) p.no_sync = 0;
  // The last one is reduced. A step in backward wants all of them reduced.
  p.kept &= (1 << (p.micro - 1)) - 1;
  if (p.no_sync || p.in_backward) p.kept = 0;
}

bool HasHooks(const Program& p) {
  return AnyUnit(p,
                 [](const ProgramUnit& unit) { return unit.hook != kNoHook; });
}

void MakeStyleValid(const Program& p, int index, ProgramStep& step) {
  if (p.infinite_in == index + 1) step.style = kPlainStep;
  if (p.in_backward && step.style != kFailedForward &&
      step.style != kStateDictBetween && step.style != kEvalBetween) {
    step.style = kPlainStep;
  }
  const bool needs_several =
      step.style == kForwardsFirst || step.style == kForwardsFirstReversed ||
      step.style == kFailBetween || step.style == kOneLoss;
  if (needs_several && p.micro == 1) step.style = kPlainStep;
  if (step.style == kOneLoss && HasHooks(p)) step.style = kForwardsFirst;
}

bool WritesParameters(int call) {
  return call == kSummon || call == kVisit || call == kLoad || call == kRestore;
}

void MakeCallsValid(const Program& p, int index, ProgramStep& step) {
  // Kept files have what was written since a step only with the next one.
  if (p.keep && step.before[1] == kRestart &&
      WritesParameters(step.before[0])) {
    step.before[1] = kNoCall;
  }
  for (int& call : step.before) {
    const bool is_stepped = p.infinite_in != index + 1;
    if (p.keep && !is_stepped && WritesParameters(call)) call = kNoCall;
    if (call == kRestart && (!p.keep || p.inference)) call = kNoCall;
    if (call == kNewOptimizer && p.keep) call = kNoCall;
    if (call == kWriteShards && p.rest_parameters) call = kNoCall;
    if (call == kToggle && p.zero % 2 == 1) call = kNoCall;
  }
  // Such models have units that Reshard() cannot name.
  for (int* call :
       {&step.before[0], &step.before[1], &step.between[0], &step.between[1]}) {
    if (*call == kRebuild && (p.no_wrap || p.wrap_linear)) *call = kNoCall;
  }
  // What is unsharded here keeps the current values.
  if (step.before[0] == kUnshard && step.before[1] > kLastHarmless) {
    step.before[1] = kNoCall;
  }
  if (p.in_backward) step.between[0] = step.between[1] = kNoCall;
  step.hold &= (1 << p.num_units) - 1;
  if (p.no_wrap || p.wrap_linear || p.in_backward) step.hold = 0;
  // The first use of a held unit frees it, and so does a scope of full
  // parameters, by which gradients are halved.
  for (int i = 0; i < p.num_units; ++i) {
    if (p.units[i].twice) step.hold &= ~(1 << i);
  }
  if (p.halve_gradients) step.hold_evals = 0;
  // The budget decides which units rest in memory and show their shards.
  if (p.budget) step.hold_evals = 0;
  if (step.hold == 0) {
    step.hold_waits = 1;
    step.hold_evals = 0;
  }
}

// Returns whether the micro-batch that is reduced, the last of a step or, with
// backwards in reverse, the first, always has a backward: where only units have
// parameters, one that trains has to compute in it.
bool AlwaysReduces(const Program& p) {
  if (!p.bare) return true;
  for (int step = 1; step <= p.num_steps; ++step) {
    for (const int micro : {1, p.micro}) {
      const auto trains = [step, micro](const ProgramUnit& unit) {
        return unit.frozen != kAllFrozen && unit.skipped_in != step &&
               unit.skipped_micro != micro;
      };
      if (!AnyUnit(p, trains)) return false;
    }
  }
  return true;
}

}  // namespace

void MakeValid(Program& p) {
  MakeGroupValid(p);
  MakeOptimizerValid(p);
  MakeModelValid(p);
  MakeRegionsValid(p);
  MakeRestValid(p);
  for (int i = 0; i < Program::kMaxSteps; ++i) {
    MakeStyleValid(p, i, p.steps[i]);
    MakeCallsValid(p, i, p.steps[i]);
  }
  // What is kept would stay so.
  if (!AlwaysReduces(p)) {
    p.no_sync = p.kept = 0;
    if (p.micro > 1) p.in_backward = 0;
  }
  const bool has_styles = std::any_of(
      p.steps.begin(), p.steps.begin() + p.num_steps,
      [](const ProgramStep& step) { return step.style != kPlainStep; });
  // An optimizer zeroes only its own gradients; a dropped backward leaves the
  // others.
  if (p.omits && has_styles) p.zero %= 2;
  // This would read gradients that rest elsewhere.
  if (p.zero == kOptimizersToZero && p.rest_gradients) p.zero = kModelToZero;
  // Kept files have no buffers.
  for (ProgramUnit& unit : p.units) {
    if (Calls(p, kRestart)) unit.counter = unit.batch_norm = 0;
  }
}

int CountOf(int choice, int ranks) {
  return choice == 0 ? 1 : choice == 1 ? 2 : ranks;
}

bool CallsByForward(const Program& program) {
  return !program.transparent || program.salt % 2 == 0;
}

bool ReusesParameters(const Program& program) {
  return program.tied ||
         AnyUnit(program, [](const ProgramUnit& unit) { return unit.twice; });
}

bool RecomputesRegions(const Program& program) {
  return program.regions || AnyUnit(program, [](const ProgramUnit& unit) {
           return unit.checkpoint || unit.recompute;
         });
}

int StrategyOf(const Program& program, const ProgramUnit& unit) {
  return unit.strategy == 0 ? program.strategy : unit.strategy - 1;
}

}  // namespace fsdp::testing
