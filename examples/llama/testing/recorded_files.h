// Reads for tests what Python's programs have recorded, and compares weights.
#ifndef EXAMPLES_LLAMA_TESTING_RECORDED_FILES_H_
#define EXAMPLES_LLAMA_TESTING_RECORDED_FILES_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"

namespace llama {

// Returns the path of a file or folder.
inline std::string Recorded(absl::string_view name) {
  return absl::StrCat("examples/llama/testing/recorded/", name);
}

inline fsdp::Json RecordedJson(absl::string_view name) {
  std::ifstream file(Recorded(name));
  const auto json =
      fsdp::Json::Parse(std::string(std::istreambuf_iterator<char>(file), {}));
  EXPECT_OK(json) << name;
  return json.value_or(fsdp::Json());
}

inline std::vector<double> NumbersIn(const fsdp::Json& list) {
  std::vector<double> numbers;
  for (const fsdp::Json& one : *list.As<fsdp::Json::Array>()) {
    numbers.push_back(one.NumberOr(-1));
  }
  return numbers;
}

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

#endif  // EXAMPLES_LLAMA_TESTING_RECORDED_FILES_H_
