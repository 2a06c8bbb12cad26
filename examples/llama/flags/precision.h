// What a model computes in, as a flag: fp32 or bf16.
#ifndef EXAMPLES_LLAMA_FLAGS_PRECISION_H_
#define EXAMPLES_LLAMA_FLAGS_PRECISION_H_

#include <string>

#include "absl/strings/string_view.h"

namespace llama {

enum class Precision { kFloat, kBFloat16 };

bool AbslParseFlag(absl::string_view text, Precision* precision,
                   std::string* error);
std::string AbslUnparseFlag(Precision precision);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_PRECISION_H_
