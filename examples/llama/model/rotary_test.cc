#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/rope_config.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::Json;

// Of configurations that are in use, computed by transformers.
TEST(RotaryTest, InverseFrequenciesAreThoseOfTransformers) {
  std::ifstream file("examples/llama/testing/recorded/rope.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_OK_AND_ASSIGN(const Json json, Json::Parse(text));
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
    std::vector<float> expected;
    for (const Json& frequency :
         *recorded.Find("inverse_frequencies")->As<Json::Array>()) {
      expected.push_back(static_cast<float>(frequency.NumberOr(0)));
    }
    const at::Tensor frequencies = InverseFrequencies(
        rope, static_cast<int64_t>(number("head_dim")), c10::DeviceType::CPU);
    EXPECT_TRUE(frequencies.allclose(at::tensor(expected), /*rtol=*/1e-6,
                                     /*atol=*/0))
        << recorded.ToString();
  }
  EXPECT_EQ(scaled, 2);
}

// The file has the spelling of transformers 5; older ones have "type" and a
// theta outside.
TEST(RotaryTest, TablesOfEveryTypeAreThoseOfTransformers) {
  std::ifstream file("examples/llama/testing/recorded/rope_types.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_OK_AND_ASSIGN(const Json json, Json::Parse(text));
  const auto numbers = [](const Json& list) {
    std::vector<double> found;
    for (const Json& one : *list.As<Json::Array>()) {
      found.push_back(one.NumberOr(0));
    }
    return found;
  };
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
          at::tensor(numbers(*recorded.Find("positions"))).to(at::kLong),
          at::kFloat);
      for (const bool is_cos : {true, false}) {
        const at::Tensor actual = is_cos ? tables.cos : tables.sin;
        const auto& rows =
            *recorded.Find(is_cos ? "cos" : "sin")->As<Json::Array>();
        for (size_t row = 0; row < rows.size(); ++row) {
          const at::Tensor expected = at::tensor(numbers(rows[row]));
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

TEST(RotaryTest, TurnsPairsByAnglesThatGrowWithThePosition) {
  const RopeConfig rope{/*theta=*/100.0, {}};
  const RotaryTables tables = MakeRotaryTables(
      rope, 4, at::tensor(std::vector<int64_t>{0, 7, 7000}), at::kFloat);
  const at::Tensor x = at::arange(24, at::kFloat).view({1, 2, 3, 4});
  const at::Tensor y = Rotate(x, tables);
  const std::vector<double> positions = {0, 7, 7000}, frequencies = {1, 0.1};
  for (int head = 0; head < 2; ++head) {
    for (int token = 0; token < 3; ++token) {
      for (int pair = 0; pair < 2; ++pair) {
        const double angle = positions[token] * frequencies[pair];
        const double a = x[0][head][token][pair].item<double>();
        const double b = x[0][head][token][pair + 2].item<double>();
        EXPECT_NEAR(y[0][head][token][pair].item<double>(),
                    a * std::cos(angle) - b * std::sin(angle), 0.05);
        EXPECT_NEAR(y[0][head][token][pair + 2].item<double>(),
                    b * std::cos(angle) + a * std::sin(angle), 0.05);
      }
    }
  }
  EXPECT_TRUE(y.select(2, 0).equal(x.select(2, 0)));
}

// Positions beyond 256 are no numbers of bfloat16.
TEST(RotaryTest, AnglesAreExactBeforeTablesAreRounded) {
  const at::Tensor positions = at::arange(1000);
  const RotaryTables exact =
      MakeRotaryTables(RopeConfig(), 8, positions, at::kFloat);
  const RotaryTables rounded =
      MakeRotaryTables(RopeConfig(), 8, positions, at::kBFloat16);
  EXPECT_TRUE(rounded.cos.equal(exact.cos.to(at::kBFloat16)));
  EXPECT_TRUE(rounded.sin.equal(exact.sin.to(at::kBFloat16)));
}

}  // namespace
}  // namespace llama
