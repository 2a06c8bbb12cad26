#include "testing/gpt/model/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"

namespace gpt {
namespace {

at::Tensor Tokens(absl::string_view text) {
  const at::Tensor tokens =
      at::empty({1, static_cast<int64_t>(text.size())}, at::kLong);
  int64_t* out = tokens.mutable_data_ptr<int64_t>();
  for (char byte : text) *out++ = static_cast<unsigned char>(byte);
  return tokens;
}

}  // namespace

std::string Sample(const LogitsFunction& logits, absl::string_view prompt,
                   const SamplerOptions& options) {
  const c10::NoGradGuard no_grad;
  at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::string text(prompt);
  while (text.size() < prompt.size() + options.num_bytes) {
    const int64_t context =
        std::min(static_cast<int64_t>(text.size()), options.seq);
    const at::Tensor last =
        logits(Tokens(absl::string_view(text).substr(text.size() - context)))
            .select(/*dim=*/1, context - 1)
            // Tokens that are no bytes cannot be text.
            .slice(/*dim=*/1, 0, 256);
    const at::Tensor probabilities =
        at::softmax(last.div(options.temperature), /*dim=*/-1);
    text.push_back(static_cast<char>(
        at::multinomial(probabilities, 1, /*replacement=*/true, generator)
            .item<int64_t>()));
  }
  return text.substr(prompt.size());
}

std::string Printable(absl::string_view text) {
  std::string printable(text);
  for (char& byte : printable) {
    if (byte != '\n' && byte != '\t' &&
        !absl::ascii_isprint(static_cast<unsigned char>(byte))) {
      byte = '?';
    }
  }
  return printable;
}

}  // namespace gpt
