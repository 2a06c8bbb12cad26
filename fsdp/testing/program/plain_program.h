// What a Program does with plain LibTorch: the oracle of a sharded run.
#ifndef FSDP_TESTING_PROGRAM_PLAIN_PROGRAM_H_
#define FSDP_TESTING_PROGRAM_PLAIN_PROGRAM_H_

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

using TensorMap = std::map<std::string, at::Tensor>;

struct StepRecord {
  std::vector<std::vector<double>> losses;               // by micro, by rank
  std::vector<std::vector<at::Tensor>> input_gradients;  // the same
  double norm = 0;   // of all gradients, before clipping
  double scale = 1;  // of the scaler, after the step
  // Parameters ("unit0.fc.weight"; of tied ones the embedding's) and states of
  // optimizers ("unit0.fc.weight.exp_avg") after the step.
  TensorMap values;
  std::vector<TensorMap> buffers;  // by rank
};

struct ProgramRecord {
  std::vector<StepRecord> steps;
  // Of kEval, kInferenceEval, kMeasure and of held units' evals, in order, by
  // rank: outputs.
  std::vector<std::vector<at::Tensor>> outputs;
  std::vector<TensorMap> saved;  // parameters at each kSave
};

// All ranks one after the other in this thread. The gradients of a step are the
// sums over micro-batches and ranks of what each backward gives by itself.
// Parameters have their stored dtype, and are rounded to the one that is
// computed in before each forward, as a sharded model gathers them.
ProgramRecord RunPlainProgram(const Program& program);

// Of optimizers, whose states may be compared: one that has all parameters.
bool HasWholeOptimizerState(const Program& program);
// The parameter of kToggle.
std::string ToggledName(const Program& program, int step);
// The divisor of gradients.
double DivisorOf(const Program& program);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PLAIN_PROGRAM_H_
