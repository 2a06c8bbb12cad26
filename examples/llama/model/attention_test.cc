#include "examples/llama/model/attention.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "examples/llama/model/documents.h"
#include "fsdp/testing/memory_meter.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::MemoryMeter;

// Queries, keys and values of 6 and 2 heads of 4 elements.
std::vector<at::Tensor> Inputs(int64_t batch, int64_t tokens,
                               c10::ScalarType dtype = at::kDouble) {
  at::manual_seed(1);
  std::vector<at::Tensor> inputs;
  for (const int64_t heads : {6, 2, 2}) {
    inputs.push_back(
        at::randn({batch, heads, tokens, 4}, dtype).set_requires_grad(true));
  }
  return inputs;
}

// By the definition, with a mask.
at::Tensor Expected(const std::vector<at::Tensor>& inputs,
                    const DocumentStarts& starts) {
  const int64_t tokens = inputs[0].size(2);
  at::Tensor mask = at::zeros({tokens, tokens}, at::kDouble);
  for (int64_t to = 0; to < tokens; ++to) {
    int64_t begin = 0;
    for (const int64_t start : starts) begin = start <= to ? start : begin;
    for (int64_t from = 0; from < tokens; ++from) {
      if (from >= begin && from <= to) continue;
      mask[to][from] = -std::numeric_limits<double>::infinity();
    }
  }
  const at::Tensor keys = inputs[1].repeat_interleave(3, 1);
  const at::Tensor values = inputs[2].repeat_interleave(3, 1);
  const at::Tensor scores =
      at::matmul(inputs[0], keys.transpose(2, 3)) / std::sqrt(4.0) + mask;
  return at::matmul(scores.softmax(-1), values);
}

void ExpectAsDefined(int64_t batch, const DocumentStarts& starts) {
  const std::vector<at::Tensor> inputs = Inputs(batch, 11);
  const std::vector<at::Tensor> others = Inputs(batch, 11);
  const at::Tensor y = CausalAttention(inputs[0], inputs[1], inputs[2], starts);
  const at::Tensor expected = Expected(others, starts);
  EXPECT_TRUE(y.allclose(expected, 1e-9, 1e-9));
  (y * y).sum().backward();
  (expected * expected).sum().backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(inputs[i].grad().allclose(others[i].grad(), 1e-8, 1e-8)) << i;
  }
}

TEST(AttentionTest, IsCausalAndGrouped) { ExpectAsDefined(2, {}); }

TEST(AttentionTest, StaysInsideOfDocuments) {
  ExpectAsDefined(1, {0, 1, 7});
  ExpectAsDefined(1, {0});
}

TEST(AttentionTest, ContinuesWithTheLastTokens) {
  for (const int64_t batch : {1, 2}) {
    const std::vector<at::Tensor> inputs = Inputs(batch, 11);
    const at::Tensor expected = Expected(inputs, {});
    for (const int64_t tokens : {1, 2, 7, 11}) {
      const at::Tensor y = ContinuedAttention(inputs[0].slice(2, 11 - tokens),
                                              inputs[1], inputs[2]);
      EXPECT_TRUE(y.allclose(expected.slice(2, 11 - tokens), 1e-9, 1e-9))
          << tokens << " of " << batch << " sequences";
    }
  }
}

int64_t PeakOf(int64_t tokens, const DocumentStarts& starts,
               c10::ScalarType dtype) {
  const std::vector<at::Tensor> inputs = Inputs(1, tokens, dtype);
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  CausalAttention(inputs[0], inputs[1], inputs[2], starts).sum().backward();
  return meter->peak();
}

TEST(AttentionTest, MemoryGrowsWithTokensNotTheirSquare) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& starts : {DocumentStarts(), {0, 100, 900}}) {
      const int64_t half = PeakOf(1024, starts, dtype);
      const int64_t whole = PeakOf(2048, starts, dtype);
      EXPECT_LT(whole, 2.5 * static_cast<double>(half)) << dtype;
      // A byte for each pair.
      EXPECT_LT(whole, 2048 * 2048) << dtype;
    }
  }
}

}  // namespace
}  // namespace llama
