#include "testing/gpt/model/sampler.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace gpt {
namespace {

// Returns logits that are certain that every byte is followed by the next.
at::Tensor CountUp(const at::Tensor& tokens) {
  const at::Tensor logits = at::full({1, tokens.size(1), 300}, -1e9);
  for (int64_t i = 0; i < tokens.size(1); ++i) {
    logits[0][i][tokens[0][i].item<int64_t>() + 1] = 0;
  }
  return logits;
}

TEST(SamplerTest, FollowsTheModelWithinItsWindow) {
  int64_t longest = 0, calls = 0;
  const auto model = [&](const at::Tensor& tokens) {
    longest = std::max(longest, tokens.size(1));
    ++calls;
    return CountUp(tokens);
  };
  EXPECT_EQ(Sample(model, "a", {/*num_bytes=*/5, /*seq=*/3}), "bcdef");
  EXPECT_EQ(longest, 3);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(Sample(model, "xyz", {/*num_bytes=*/0, /*seq=*/3}), "");
}

TEST(SamplerTest, DependsOnTheSeedAloneAndStaysWithBytes) {
  const auto uniform = [](const at::Tensor& tokens) {
    return at::zeros({1, tokens.size(1), 1000});
  };
  const std::string text = Sample(uniform, "a", {100, 8, 0.8, 1});
  EXPECT_EQ(text, Sample(uniform, "a", {100, 8, 0.8, 1}));
  EXPECT_NE(text, Sample(uniform, "a", {100, 8, 0.8, 2}));
  EXPECT_GT(std::set<char>(text.begin(), text.end()).size(), 50);
}

TEST(SamplerTest, PrintableTextCannotCommandATerminal) {
  EXPECT_EQ(Printable("int a;\n\tb\x1b[2J\r\x80\x7f"), "int a;\n\tb?[2J???");
}

}  // namespace
}  // namespace gpt
