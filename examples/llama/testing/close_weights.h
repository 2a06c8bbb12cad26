// Compares what two trainings have made of a model, for tests.
#ifndef EXAMPLES_LLAMA_TESTING_CLOSE_WEIGHTS_H_
#define EXAMPLES_LLAMA_TESTING_CLOSE_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace llama {

// Expects the same weights but for rounding, and records the largest difference
// of those whose gradients are more than that.
//
// Adam divides a gradient by its own size: if the gradient is only rounding, so
// is the step. What the bias of a key adds to a score is nearly the same for
// all keys, and attention does not change with it. PyTorch differs from itself
// by as much. These biases may differ by `key_bias_bound`.
inline void ExpectCloseWeights(
    const torch::OrderedDict<std::string, at::Tensor>& actual,
    const torch::OrderedDict<std::string, at::Tensor>& expected,
    double key_bias_bound) {
  double largest = 0;
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& item : expected) {
    const at::Tensor* const value = actual.find(item.key());
    EXPECT_NE(value, nullptr) << item.key();
    if (value == nullptr) continue;
    const double off = (*value - item.value()).abs().max().item<double>();
    if (absl::EndsWith(item.key(), "k_proj.bias")) {
      EXPECT_LT(off, key_bias_bound) << item.key();
      continue;
    }
    EXPECT_TRUE(at::allclose(*value, item.value(), 1e-4, 1e-5))
        << item.key() << " is off by " << off;
    largest = std::max(largest, off);
  }
  ::testing::Test::RecordProperty("weights", absl::StrCat(largest));
}

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TESTING_CLOSE_WEIGHTS_H_
