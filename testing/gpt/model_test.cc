#include "testing/gpt/model.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

constexpr GptConfig kSmall{/*vocab=*/11, /*dim=*/8, /*layers=*/2, /*heads=*/2,
                           /*seq=*/6};

std::vector<std::string> Names(const GptImpl& model) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) names.push_back(item.key());
  return names;
}

TEST(ModelTest, HasTheParametersOfThePeer) {
  Gpt model(GptConfig{11, 8, 1, 2, 6});
  EXPECT_THAT(
      Names(*model),
      ::testing::ElementsAre(
          "wte.weight", "wpe.weight", "blocks.0.ln1.weight",
          "blocks.0.ln1.bias", "blocks.0.qkv.weight", "blocks.0.qkv.bias",
          "blocks.0.proj.weight", "blocks.0.proj.bias", "blocks.0.ln2.weight",
          "blocks.0.ln2.bias", "blocks.0.fc.weight", "blocks.0.fc.bias",
          "blocks.0.out.weight", "blocks.0.out.bias", "ln.weight", "ln.bias",
          "head.weight"));
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters["blocks.0.qkv.weight"].sizes(),
            (std::vector<int64_t>{24, 8}));
  EXPECT_EQ(parameters["wpe.weight"].sizes(), (std::vector<int64_t>{6, 8}));
  EXPECT_EQ(parameters["head.weight"].sizes(), (std::vector<int64_t>{11, 8}));
}

// benchmarks/peers/peer_gpt.py seeds the default generator and constructs, too.
TEST(ModelTest, InitialParametersAreThoseOfASeededConstruction) {
  Gpt model(kSmall);
  InitializeParameters(*model, 5);

  at::manual_seed(5);
  torch::nn::Embedding wte(11, 8), wpe(6, 8);
  std::vector<at::Tensor> expected{wte->weight, wpe->weight};
  for (int layer = 0; layer < 2; ++layer) {
    torch::nn::Linear qkv(8, 24), proj(8, 8), fc(8, 32), out(32, 8);
    for (const auto& linear : {qkv, proj, fc, out}) {
      expected.push_back(linear->weight);
      expected.push_back(linear->bias);
    }
  }
  torch::nn::Linear head(torch::nn::LinearOptions(8, 11).bias(false));
  expected.push_back(head->weight);

  size_t next = 0;
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("ln") != std::string::npos) continue;
    ASSERT_LT(next, expected.size());
    EXPECT_TRUE(item.value().equal(expected[next++])) << item.key();
  }
  EXPECT_EQ(next, expected.size());
  Gpt other(kSmall);
  InitializeParameters(*other, 6);
  EXPECT_FALSE(other->parameters()[0].equal(expected[0]));
}

TEST(ModelTest, ALaterTokenDoesNotChangeEarlierLogits) {
  Gpt model(kSmall);
  InitializeParameters(*model, 0);
  const c10::NoGradGuard no_grad;
  const at::Tensor tokens = at::arange(6).view({1, 6});
  at::Tensor changed = tokens.clone();
  changed[0][4] = 10;
  const at::Tensor logits = model->forward(tokens);
  const at::Tensor other = model->forward(changed);
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{1, 6, 11}));
  EXPECT_TRUE(logits.slice(1, 0, 4).equal(other.slice(1, 0, 4)));
  EXPECT_FALSE(logits.slice(1, 4, 5).equal(other.slice(1, 4, 5)));
  EXPECT_EQ(model->forward(tokens.slice(1, 0, 3)).size(1), 3);
}

TEST(ModelTest, EveryParameterGetsAGradientAlsoByCheckpointing) {
  Gpt model(kSmall), checkpointing(kSmall, /*checkpointing=*/true);
  const at::Tensor tokens = at::arange(6).view({1, 6});
  for (const Gpt& each : {model, checkpointing}) {
    InitializeParameters(*Gpt(each), 5);
    NextTokenLoss(Gpt(each)->forward(tokens), tokens).backward();
  }
  const auto gradients = checkpointing->named_parameters();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(item.value().grad().equal(gradients[item.key()].grad()))
        << item.key();
  }
  EXPECT_NEAR(NextTokenLoss(at::zeros({2, 3, 11}), at::arange(6).view({2, 3}))
                  .item<float>(),
              std::log(11), 1e-6);
}

}  // namespace
}  // namespace gpt
