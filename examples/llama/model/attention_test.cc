#include "examples/llama/model/attention.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>

#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/testing/recorded_files.h"
#include "fsdp/testing/memory_meter.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::testing::MemoryMeter;

// Returns queries, keys and values of 6 and 2 heads of 4 elements.
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

// Follows the definition, with a mask.
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

TEST(AttentionTest, IsCausalAndGroupedInsideOfDocuments) {
  ExpectAsDefined(2, {});
  ExpectAsDefined(1, {0, 1, 7});
  ExpectAsDefined(1, {0});
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
      // A byte for each pair would be more.
      EXPECT_LT(whole, 2048 * 2048) << dtype;
    }
  }
}

// The configurations are in use; transformers has computed the numbers.
TEST(RotaryTest, InverseFrequenciesAreThoseOfTransformers) {
  const Json json = RecordedJson("rope.json");
  int scaled = 0;
  for (const Json& recorded : *json.As<Json::Array>()) {
    const auto number = [&recorded](const char* name) {
      const Json* value = recorded.Find(name);
      return value == nullptr ? 0 : value->NumberOr(0);
    };
    RopeConfig rope{number("rope_theta"), {}};
    if (recorded.Find("rope_type") != nullptr) {
      ++scaled;
      rope.scaling = {
          RopeScaling::Type::kLlama3, number("factor"),
          number("low_freq_factor"), number("high_freq_factor"),
          static_cast<int64_t>(number("original_max_position_embeddings"))};
    }
    const at::Tensor expected =
        at::tensor(NumbersIn(*recorded.Find("inverse_frequencies")));
    const at::Tensor frequencies = InverseFrequencies(
        rope, static_cast<int64_t>(number("head_dim")), c10::DeviceType::CPU);
    EXPECT_TRUE(frequencies.allclose(expected.to(at::kFloat), /*rtol=*/1e-6,
                                     /*atol=*/0))
        << recorded.ToString();
  }
  EXPECT_EQ(scaled, 2);
}

// The file is of transformers 5; older ones have "type" and a theta outside.
TEST(RotaryTest, TablesOfEveryTypeAreThoseOfTransformers) {
  const Json json = RecordedJson("rope_types.json");
  EXPECT_EQ(json.As<Json::Array>()->size(), 10);
  for (const Json& recorded : *json.As<Json::Array>()) {
    const Json& parameters = *recorded.Find("rope_parameters");
    Json::Object old;
    for (const auto& [name, value] : *parameters.As<Json::Object>()) {
      if (name != "rope_theta") {
        old.emplace_back(name == "rope_type" ? "type" : name, value);
      }
    }
    const Json::Object configs[] = {
        {{"rope_parameters", parameters}},
        {{"rope_scaling", old},
         {"rope_theta", *parameters.Find("rope_theta")}}};
    for (const Json::Object& config : configs) {
      ASSERT_OK_AND_ASSIGN(
          const RopeConfig rope,
          ParseRopeConfig(config, /*max_position_embeddings=*/64));
      const RotaryTables tables = MakeRotaryTables(
          rope, 16,
          at::tensor(NumbersIn(*recorded.Find("positions"))).to(at::kLong),
          at::kFloat);
      for (const bool is_cos : {true, false}) {
        const at::Tensor actual = is_cos ? tables.cos : tables.sin;
        const auto& rows =
            *recorded.Find(is_cos ? "cos" : "sin")->As<Json::Array>();
        for (size_t row = 0; row < rows.size(); ++row) {
          const at::Tensor expected = at::tensor(NumbersIn(rows[row]));
          // An angle of 200 has an error of 1e-5 in float32.
          EXPECT_TRUE(actual[static_cast<int64_t>(row)]
                          .to(at::kDouble)
                          .allclose(expected, /*rtol=*/1e-5, /*atol=*/5e-5))
              << recorded.ToString();
        }
      }
    }
  }
}

// bfloat16 has no positions beyond 256.
TEST(RotaryTest, AnglesAreExactBeforeTablesAreRounded) {
  const at::Tensor positions = at::arange(1000);
  const RotaryTables exact =
      MakeRotaryTables(RopeConfig(), 8, positions, at::kFloat);
  const RotaryTables rounded =
      MakeRotaryTables(RopeConfig(), 8, positions, at::kBFloat16);
  EXPECT_TRUE(rounded.cos.equal(exact.cos.to(at::kBFloat16)));
  EXPECT_TRUE(rounded.sin.equal(exact.sin.to(at::kBFloat16)));
}

TEST(RmsNormTest, RoundsBeforeItMultipliesByTheWeight) {
  const c10::NoGradGuard no_grad;
  at::manual_seed(0);
  RmsNorm norm(64, /*eps=*/1e-6);
  norm->to(at::kBFloat16);
  norm->weight.copy_(at::randn({64}));
  const at::Tensor x = at::randn({8, 64}).to(at::kBFloat16);
  const at::Tensor exact = x.to(at::kDouble);
  const at::Tensor normalized =
      exact / (exact.square().mean(-1, /*keepdim=*/true) + 1e-6).sqrt();
  const at::Tensor y = norm->forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(y.equal(normalized.to(at::kBFloat16) * norm->weight));
  EXPECT_FALSE(
      y.equal((normalized * norm->weight.to(at::kDouble)).to(at::kBFloat16)));
}

// Sharded models keep norms in full precision, for example.
TEST(RmsNormTest, AnExacterWeightGivesAnExacterResult) {
  const c10::NoGradGuard no_grad;
  RmsNorm norm(2, /*eps=*/1e-6);
  EXPECT_EQ(norm->forward(at::full({1, 2}, 1.0, at::kBFloat16)).scalar_type(),
            at::kFloat);
}

}  // namespace
}  // namespace llama
