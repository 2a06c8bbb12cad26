// What the frozen weights under adapters rest in, as a flag: precision, that in
// which the model computes, or int8.
#ifndef EXAMPLES_LLAMA_FLAGS_BASE_H_
#define EXAMPLES_LLAMA_FLAGS_BASE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace llama {

enum class Base { kPrecision, kInt8 };

bool AbslParseFlag(absl::string_view text, Base* base, std::string* error);
std::string AbslUnparseFlag(Base base);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_BASE_H_
