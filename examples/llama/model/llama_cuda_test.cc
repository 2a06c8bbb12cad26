// The kernels that a model has on CUDA alone give the CPU's values. Needs a
// GPU.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {
namespace {

// Returns the loss and then the gradients, in float64 on the CPU.
std::vector<at::Tensor> Train(const LlamaConfig& config, c10::Device device,
                              c10::ScalarType dtype,
                              const DocumentStarts& starts) {
  CausalLm model(config);
  InitializeParameters(*model, /*seed=*/7, /*stddev=*/0.2);
  model->to(device, dtype);
  const at::Tensor tokens = at::arange(80).view({2, 40});
  const at::Tensor targets = tokens + 1;
  targets[1][39] = kIgnoredTarget;
  const at::Tensor loss =
      model->forward(tokens.to(device), starts, targets.to(device));
  loss.backward();
  std::vector<at::Tensor> results = {loss.detach().cpu().to(at::kDouble)};
  for (const at::Tensor& parameter : model->parameters()) {
    results.push_back(parameter.grad().cpu().to(at::kDouble));
  }
  return results;
}

TEST(LlamaOnCudaTest, LossAndGradientsAreThoseOfTheCpu) {
  for (const char* type : {"llama", "qwen3"}) {
    ASSERT_OK_AND_ASSIGN(
        const LlamaConfig config,
        ParseLlamaConfig(absl::StrCat(
            R"({"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "model_type": ")",
            type, "\"}")));
    for (const DocumentStarts& starts : {DocumentStarts(), {0, 17, 40}}) {
      const auto expected = Train(config, at::kCPU, at::kFloat, starts);
      for (const auto& [dtype, tolerance] :
           {std::pair(at::kFloat, 1e-4), {at::kBFloat16, 0.1}}) {
        SCOPED_TRACE(
            absl::StrCat(type, " ", c10::toString(dtype), " ", starts.size()));
        const auto actual =
            Train(config, c10::Device(at::kCUDA, 0), dtype, starts);
        EXPECT_NEAR(actual[0].item<double>(), expected[0].item<double>(),
                    tolerance);
        double lost = 0, all = 0;
        for (size_t i = 1; i < expected.size(); ++i) {
          lost += (actual[i] - expected[i]).square().sum().item<double>();
          all += expected[i].square().sum().item<double>();
        }
        EXPECT_LT(std::sqrt(lost / all), tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace llama
