// Runs a Program with plain LibTorch: the oracle of a sharded run.
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
  // Parameters ("unit0.fc.weight"; a tied one by the embedding's name) and
  // optimizer states ("unit0.fc.weight.exp_avg") after the step.
  TensorMap values;
  std::vector<TensorMap> buffers;  // by rank
};

struct ProgramRecord {
  std::vector<StepRecord> steps;
  // The outputs of kEval, kInferenceEval, kMeasure and of held units'
  // evaluations, in order, then by rank.
  std::vector<std::vector<at::Tensor>> outputs;
  std::vector<TensorMap> saved;  // parameters at each kSave
};

// Runs all ranks one after the other in this thread. A step's gradients are
// sums over micro-batches and ranks of each backward's own. Parameters have
// their stored dtype and are rounded to the computing dtype before each
// forward, as a sharded model gathers them.
ProgramRecord RunPlainProgram(const Program& program);

// Returns whether one optimizer has all parameters, so that states can be
// compared.
bool HasWholeOptimizerState(const Program& program);
// Returns the name of kToggle's parameter.
std::string ToggledName(const Program& program, int step);
double DivisorOf(const Program& program);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PLAIN_PROGRAM_H_
