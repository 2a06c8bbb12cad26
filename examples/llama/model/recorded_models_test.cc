// Compares with models made by examples/llama/testing/record_models.py, and
// with what transformers has computed with them.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/model_files.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/testing/recorded_files.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::checkpoint::LoadModel;

constexpr int64_t kBatch = 2, kTokens = 16, kVocab = 128;

at::Tensor Integers(const Json& rows) {
  std::vector<at::Tensor> tensors;
  for (const Json& row : *rows.As<Json::Array>()) {
    std::vector<int64_t> numbers;
    for (const Json& number : *row.As<Json::Array>()) {
      numbers.push_back(*number.As<int64_t>());
    }
    tensors.push_back(at::tensor(numbers));
  }
  return at::stack(tensors);
}

double MaxDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Returns how much two ways to compute these logits in float32 may differ, in
// whatever order a machine's kernels sum: a few dozen roundings follow each
// other, each of at most half an ulp of the largest numbers.
double RoundingOf(const at::Tensor& logits) {
  return 64 * std::numeric_limits<float>::epsilon() *
         logits.abs().max().item<double>();
}

// It holds recorded.safetensors: a file has what a module has.
struct RecordedLogits : torch::nn::Module {
  at::Tensor logits =
      register_buffer("logits", at::zeros({kBatch, kTokens, kVocab}));
  at::Tensor bfloat16_logits =
      register_buffer("bfloat16_logits", at::zeros({kBatch, kTokens, kVocab}));
};

class RecordedModelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    tokens_ = Integers(*recorded_.Find("tokens"));
    ASSERT_OK(
        LoadModel(Recorded(GetParam() + "/recorded.safetensors"), logits_));
  }

  absl::StatusOr<LlamaConfig> Config() const {
    return ParseLlamaConfig(
        RecordedJson(GetParam() + "/config.json").ToString());
  }

  absl::StatusOr<CausalLm> Load(c10::ScalarType dtype = at::kFloat) const {
    FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, Config());
    CausalLm model(config);
    model->to(dtype);
    FSDP_RETURN_IF_ERROR(
        LoadModel(Recorded(GetParam() + "/model.safetensors"), *model));
    return model;
  }

  // Returns what follows each token; nothing follows the last one.
  at::Tensor Targets() const {
    return at::cat({tokens_.slice(1, 1),
                    at::full({kBatch, 1}, kIgnoredTarget, tokens_.options())},
                   1);
  }

  const Json recorded_ = RecordedJson(GetParam() + "/recorded.json");
  at::Tensor tokens_;
  RecordedLogits logits_;
};

INSTANTIATE_TEST_SUITE_P(Models, RecordedModelsTest,
                         ::testing::Values("llama_scaled_rope", "llama_tied",
                                           "qwen2", "qwen3"),
                         [](const auto& info) { return info.param; });

TEST_P(RecordedModelsTest, LogitsAreThoseOfTransformers) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load());
  const c10::NoGradGuard no_grad;
  const double difference =
      MaxDifference(model->forward(tokens_), logits_.logits);
  RecordProperty("difference", absl::StrCat(difference));
  EXPECT_LT(difference, RoundingOf(logits_.logits));
}

TEST_P(RecordedModelsTest, LossAndGradientsAreThoseOfTransformers) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load());
  const at::Tensor loss = model->forward(tokens_, {}, Targets());
  EXPECT_NEAR(loss.item<double>(), recorded_.Find("loss")->NumberOr(0), 1e-5);
  loss.backward();
  std::map<std::string, double> norms;
  for (const auto& item : model->named_parameters()) {
    norms[item.key()] = item.value().grad().norm().item<double>();
  }
  const auto& expected = *recorded_.Find("gradients")->As<Json::Object>();
  EXPECT_EQ(norms.size(), expected.size());
  for (const auto& [name, norm] : expected) {
    ASSERT_TRUE(norms.count(name) == 1) << name;
    EXPECT_NEAR(norms[name] / norm.NumberOr(0), 1, 1e-4) << name;
  }
}

// Continues after the first tokens, so many at a time; the logits of the last
// one are each time those of the whole.
void ContinueInChunks(CausalLm& model, const LlamaConfig& config,
                      const at::Tensor& tokens, const at::Tensor& logits,
                      int64_t first, int64_t chunk) {
  KvCache cache = MakeKvCache(config, kBatch, kTokens, at::kFloat);
  int64_t end = first;
  for (int64_t begin = 0; begin < kTokens; begin = end, end += chunk) {
    end = std::min(end, kTokens);
    const at::Tensor last = model->Continue(tokens.slice(1, begin, end), cache);
    EXPECT_EQ(cache.tokens, end);
    EXPECT_LT(MaxDifference(last, logits.select(1, end - 1)),
              RoundingOf(logits))
        << "tokens " << begin << " to " << end;
  }
}

TEST_P(RecordedModelsTest, ContinuesWithTheLogitsOfTheWhole) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load());
  ASSERT_OK_AND_ASSIGN(const LlamaConfig config, Config());
  const c10::NoGradGuard no_grad;
  const at::Tensor logits = model->forward(tokens_);
  for (const int64_t chunk : {1, 3, 7}) {
    // Each token is the last of a chunk once.
    for (int64_t first = 1; first <= chunk; ++first) {
      SCOPED_TRACE(absl::StrCat(first, ", then ", chunk, " at a time"));
      ContinueInChunks(model, config, tokens_, logits, first, chunk);
    }
  }
  ContinueInChunks(model, config, tokens_, logits, kTokens, kTokens);
}

TEST_P(RecordedModelsTest, LogitsInBfloat16AreWithinItsRounding) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load(at::kBFloat16));
  const c10::NoGradGuard no_grad;
  const at::Tensor logits = model->forward(tokens_);
  EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
  const double difference =
      MaxDifference(logits.to(at::kFloat), logits_.bfloat16_logits);
  const double rounding =
      MaxDifference(logits_.bfloat16_logits, logits_.logits);
  RecordProperty("difference", absl::StrCat(difference));
  RecordProperty("rounding", absl::StrCat(rounding));
  EXPECT_LT(difference, rounding);
}

TEST_P(RecordedModelsTest, PackedDocumentsAreThoseOfRowsOfTheirOwn) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load());
  const c10::NoGradGuard no_grad;
  const DocumentStarts starts = {0, 1, 9, 16, 27};
  const at::Tensor packed = model->forward(tokens_, starts).view({-1, kVocab});
  const at::Tensor row = tokens_.view({1, -1});
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t begin = starts[i];
    const int64_t end =
        i + 1 < starts.size() ? starts[i + 1] : kBatch * kTokens;
    const at::Tensor alone =
        model->forward(row.slice(1, begin, end)).squeeze(0);
    EXPECT_LT(MaxDifference(packed.slice(0, begin, end), alone),
              RoundingOf(alone))
        << i;
  }
  // Otherwise there would be nothing to see.
  EXPECT_GT(MaxDifference(packed.view({kBatch, kTokens, -1}), logits_.logits),
            0.1);
}

// In exact arithmetic only distances of positions count. In bfloat16, which
// rounds cosines, positions do.
TEST_P(RecordedModelsTest, PositionsBeginAnewWithEachDocument) {
  ASSERT_OK_AND_ASSIGN(CausalLm model, Load(at::kBFloat16));
  const c10::NoGradGuard no_grad;
  const at::Tensor row = tokens_.view({1, -1});
  const at::Tensor packed = model->forward(row, {0, 16}).slice(1, 16);
  const double difference = MaxDifference(
      packed.to(at::kFloat), model->forward(row.slice(1, 16)).to(at::kFloat));
  const double rounding =
      MaxDifference(logits_.bfloat16_logits, logits_.logits);
  RecordProperty("difference", absl::StrCat(difference));
  EXPECT_LT(difference, 0.25 * rounding);
}

}  // namespace
}  // namespace llama
