// A training program as plain data: a model, how it is sharded and trained, and
// which other calls are made. It can be drawn from a seed, printed, read back
// and made smaller. Free of LibTorch.
//
// All values are ints, so that one table of fields (Fields()) draws, prints,
// reads and shrinks them. Each has a plain value: that of the simplest program.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_H_

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::testing {

// The values of Program::group.
enum { kLocalGroup, kSharedGroup, kGlooGroup, kSharedHosts, kLocalHosts };
// The values of Program::precision: a dtype that is stored and computed in, or
// the dtype in which double parameters are computed.
enum { kDouble, kFloat, kComputeFloat, kComputeBFloat16, kComputeHalf };
// The values of Program::optimizer. The first three have fused forms.
enum { kSgd, kAdamW, kAdam, kAdagrad, kRmsProp };
// The values of Program::zero: what drops gradients, and whether to none or
// zero.
enum { kModelToNone, kModelToZero, kOptimizersToNone, kOptimizersToZero };
// The values of Program::regions: what else backward computes again.
enum {
  kNoRegions,
  kEachUnit,      // each call of a unit
  kAllUnits,      // all of them together
  kNestedRegions  // each unit inside the region of the one before
};
// The values of Program::tied: the head's weight may be the embedding's, and
// one of the two may be frozen.
enum { kUntied, kTied, kTiedHeadFrozen, kTiedEmbeddingFrozen };

// The values of ProgramUnit::outputs: what else a unit returns and its parent
// does.
enum {
  kOneOutput,
  kUnusedOutput,     // a second one that nobody uses
  kSometimesOutput,  // a second one that some ranks use
  kHookedOutput,     // unused, with a hook of the user's inside the unit
  kViewOutput,       // the second is a view of the first, which is written
  kWrittenOutput,    // the parent writes the only one in place
};
// The values of ProgramUnit::frozen.
enum { kTrainable, kWeightFrozen, kAllFrozen };
// The values of ProgramUnit::hook: a parameter's hook is registered before or
// after sharding.
enum { kNoHook, kHookBefore, kHookAfter };

// Calls between forwards, backwards and steps. Up to kLastHarmless they change
// neither parameters nor gradients.
enum {
  kNoCall,
  kLook,           // Unshard(), Wait(), Reshard() of each unit
  kRebuild,        // RebuildFullParams(), Reshard()
  kEval,           // a forward in eval mode, compared
  kInferenceEval,  // the same in InferenceMode
  kMeasure,        // a forward with grad whose loss is compared, and dropped
  kLostForward,    // a forward without grad in train mode
  kTakeStateDict,
  kSave,             // torch::save, read by a plain model, compared
  kInferenceSummon,  // SummonFullParams() inside InferenceMode, read only
  kLastHarmless = kInferenceSummon,
  kUnshard,  // all units, left so for the next forward
  kSummon,   // SummonFullParams(), written
  kVisit,    // ForEachFullParameter(), written
  kLoad,     // LoadStateDict() of other values
  kSnapshot,
  kRestore,  // what kSnapshot took, model and optimizer
  kNewOptimizer,
  kToggle,  // SetTrainable() of one parameter
  kWriteShards,
  kRestart,  // the model anew from kept files
  kNumCalls,
};

// How a step runs its micro-batches.
enum {
  kPlainStep,
  kForwardsFirst,  // all forwards, then the backwards in order
  kForwardsFirstReversed,
  kRetain,            // each backward twice
  kLostBackward,      // first one under NoSync(), dropped by zero_grad()
  kFailedForward,     // first one that throws on all ranks, then zero_grad()
  kFailedBackward,    // the same in backward
  kFailBetween,       // a forward that throws after the first backward; kept on
  kStateDictBetween,  // after each backward
  kEvalBetween,
  kOneLoss,  // one backward for the sum of all losses
  kNumStyles,
};

struct ProgramUnit {
  int hidden, bias, checkpoint, twice, scale, unused, sometimes, counter,
      layer_norm, batch_norm, child, frozen, empty, outputs, hook, writes_input,
      strategy, skipped_in,  // step + 1, or 0
      skipped_micro,         // micro-batch + 1, or 0
      recompute;             // Options::recompute.units has it
};

struct ProgramStep {
  int before[2];   // calls before the first forward
  int between[2];  // harmless calls between the last backward and the step
  int style;
  // Units (bits) that are unsharded before the optimizer's step and resharded
  // after it; whether the step waits for them; whether a forward in eval mode
  // comes first, in which they still have the old values.
  int hold, hold_waits, hold_evals;
};

struct Program {
  static constexpr int kMaxUnits = 4;
  static constexpr int kMaxSteps = 6;

  // The group. `rows` of the mesh and `hosts` of a hierarchical group are 0 for
  // one, 1 for two, 2 for as many as ranks.
  int ranks, group, rows, hosts;
  int late, yields;  // the late rank + 1; its delay is 10^n yields
  int salt;          // decides choices of no interest

  // The model.
  int precision, exact_reduce, dim, num_units, tied, bare, writes_input,
      input_grad, deferred, transparent, wrap_linear, no_wrap, regions;
  std::array<ProgramUnit, kMaxUnits> units;

  // How it is sharded.
  int strategy, backward_group, share_memory, reshard_root, forward_prefetch,
      backward_prefetch, check_order, divide, predivide, quantize_gather,
      quantize_reduce, low_precision_gradients;

  // Where it rests: 0 is the device, 1 files.
  int rest_parameters, rest_gradients, rest_states, budget, keep, rollback,
      big_blocks, distance, offload_activations;

  // The optimizer.
  int optimizer, fused, groups, two_optimizers, omits, in_backward, amsgrad,
      weight_decay, momentum, nesterov, zero, clip, norm, scaler, infinite_in,
      halve_gradients, new_rates;

  // The steps.
  // Micro-batches (bits) that are not reduced; `no_sync` stands for all but the
  // last. Whether calls before a step are made inside InferenceMode.
  int num_steps, micro, no_sync, kept, compare_each, inference;
  std::array<ProgramStep, kMaxSteps> steps;
};

struct Field {
  std::string name;  // "unit0.hidden"
  int* value;
  int plain;
  int low, high;
  int percent;  // chance that it is drawn from low ... high; else it is plain
  // The texts of low ... high; empty if they are numbers.
  std::vector<absl::string_view> texts;
};

// Returns the fields of all units and steps if `all`, else of those in use.
std::vector<Field> Fields(Program& program, bool all);

Program PlainProgram();

struct DrawOptions {
  std::set<std::string> off;       // fields that stay plain
  std::map<std::string, int> set;  // fields with a value of their own
  // Draws also checkpointed regions of transparent models, which the library is
  // known not to do right.
  bool held = false;
};

// Returns a valid program, the same for a seed and options on every machine.
Program DrawProgram(uint32_t seed, const DrawOptions& options = DrawOptions());

// Takes back features that exclude each other, so that the program means
// something for a plain model and is permitted for a sharded one. Leaves valid
// programs as they are.
void MakeValid(Program& program);

// Returns the number for which a value of `rows` or `hosts` stands.
int CountOf(int choice, int ranks);
// Returns whether parents call units by fsdp::Forward(), not directly.
bool CallsByForward(const Program& program);
// Returns whether gradients of several uses of a parameter are added up.
bool ReusesParameters(const Program& program);
// Returns whether units have regions that backward recomputes.
bool RecomputesRegions(const Program& program);
// Returns the strategy of a unit: 0 ... 5 as in Program::strategy.
int StrategyOf(const Program& program, const ProgramUnit& unit);

// Returns what is not plain, as in "ranks=3 step0.style=retain"; "" for the
// plain program.
std::string ToString(const Program& program);
// Reads ToString()'s text. Returns InvalidArgument with what it does not know.
absl::StatusOr<Program> ParseProgram(absl::string_view text);
// Reads "name=value,name=value" for DrawOptions::set.
absl::StatusOr<std::map<std::string, int>> ParseSettings(
    absl::string_view text);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_H_
