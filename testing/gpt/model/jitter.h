// Makes a rank slower at random, for benchmarks: what do ranks lose that wait
// for each other?
#ifndef TESTING_GPT_MODEL_JITTER_H_
#define TESTING_GPT_MODEL_JITTER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace gpt {

// Slows down a chain of layers on one rank, whose forward and backward run in
// the same thread. Every layer's forward and backward take longer by a part of
// their own CPU time that is uniform in [0, share).
class Jitter {
 public:
  // `share` is at least 0.
  Jitter(double share, uint64_t seed);

  // `x` is about to enter the first layer.
  void Begin(const at::Tensor& x);
  // `x` leaves a layer and enters the next one. Prolongs that layer's forward,
  // and the next layer's backward if x needs a gradient.
  void Next(const at::Tensor& x);

 private:
  class Clock;

  void ProlongBackward(const at::Tensor& x) const;

  const std::shared_ptr<Clock> clock_;  // graphs may outlive this
};

}  // namespace gpt

#endif  // TESTING_GPT_MODEL_JITTER_H_
