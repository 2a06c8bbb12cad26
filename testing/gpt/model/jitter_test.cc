#include "testing/gpt/model/jitter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <ctime>

#include "gtest/gtest.h"

namespace gpt {
namespace {

double CpuSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

void ComputeFor(double seconds) {
  const double end = CpuSeconds() + seconds;
  while (CpuSeconds() < end) {
  }
}

// CPU time of a layer's forward and backward that take `seconds` each.
struct Costs {
  double forward = 0;
  double backward = 0;
};
Costs Measure(double share, double seconds, int layers) {
  Jitter jitter(share, /*seed=*/3);
  at::Tensor x = at::randn({4}).set_requires_grad(true) * 1;
  jitter.Begin(x);
  const double begin = CpuSeconds();
  for (int i = 0; i < layers; ++i) {
    at::Tensor y = x * 2;
    y.register_hook([seconds](const at::Tensor&) { ComputeFor(seconds); });
    ComputeFor(seconds);
    x = y + 1;
    jitter.Next(x);
  }
  const double middle = CpuSeconds();
  x.sum().backward();
  const double end = CpuSeconds();
  return {(middle - begin) / layers, (end - middle) / layers};
}

// The draws of this seed have a mean above 0.8. Other load only makes the times
// longer.
TEST(JitterTest, ProlongsForwardAndBackwardByHalfTheShareOnAverage) {
  const Costs costs = Measure(/*share=*/2, /*seconds=*/1e-3, /*layers=*/40);
  EXPECT_GT(costs.forward, 1e-3 * 1.6);
  EXPECT_GT(costs.backward, 1e-3 * 1.6);
}

TEST(JitterTest, ValuesAndGradientsStayAsTheyAre) {
  Jitter jitter(/*share=*/1, /*seed=*/0);
  const at::Tensor leaf = at::randn({5}).set_requires_grad(true);
  const at::Tensor x = leaf * 3;
  jitter.Begin(x);
  const at::Tensor y = x * 2;
  jitter.Next(y);
  y.sum().backward();
  EXPECT_TRUE(y.equal(leaf * 6));
  EXPECT_TRUE(leaf.grad().equal(at::full({5}, 6.0)));
}

TEST(JitterTest, NeedsNoGradients) {
  Jitter jitter(/*share=*/1, /*seed=*/0);
  jitter.Begin(at::ones({2}));
  jitter.Next(at::ones({2}));
}

}  // namespace
}  // namespace gpt
