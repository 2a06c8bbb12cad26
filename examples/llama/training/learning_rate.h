// How the learning rate goes from step to step.
#ifndef EXAMPLES_LLAMA_TRAINING_LEARNING_RATE_H_
#define EXAMPLES_LLAMA_TRAINING_LEARNING_RATE_H_

#include <cstdint>

namespace llama {

struct LearningRate {
  double peak = 2e-5;
  int64_t warmup = 0;  // steps
  int64_t steps = 1;   // of the whole run, warm-up included
  double floor = 0.1;  // of the peak: what it ends with

  // Of `step`, from 0: linear from peak / warmup to the peak, which the first
  // step after the warm-up has, then half a cosine to floor * peak behind the
  // last one.
  double At(int64_t step) const;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_LEARNING_RATE_H_
