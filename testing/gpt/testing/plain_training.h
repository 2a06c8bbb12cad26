// The oracle: training without this library.
#ifndef TESTING_GPT_TESTING_PLAIN_TRAINING_H_
#define TESTING_GPT_TESTING_PLAIN_TRAINING_H_

#include <cstdint>
#include <vector>

#include "testing/gpt/batches.h"
#include "testing/gpt/model.h"

namespace gpt::testing {

enum class Optimizer {
  kTorch,  // torch::optim::AdamW
  kFused,  // the kernel that training uses, for comparing bits
};

struct PlainTraining {
  GptConfig model;
  BatchShape shape;  // of each rank
  int ranks;         // their batches of synthetic data make one
  int64_t steps;
  uint64_t seed;
  Optimizer optimizer = Optimizer::kTorch;
};

// Returns the losses of a plain loop in this thread.
std::vector<double> PlainLosses(const PlainTraining& training);

}  // namespace gpt::testing

#endif  // TESTING_GPT_TESTING_PLAIN_TRAINING_H_
