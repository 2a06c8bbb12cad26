#include "examples/llama/flags/precision.h"

#include <string>

#include "absl/strings/string_view.h"

namespace llama {

bool AbslParseFlag(absl::string_view text, Precision* precision,
                   std::string* error) {
  if (text != "fp32" && text != "bf16") {
    *error = "expected fp32 or bf16";
    return false;
  }
  *precision = text == "fp32" ? Precision::kFloat : Precision::kBFloat16;
  return true;
}

std::string AbslUnparseFlag(Precision precision) {
  return precision == Precision::kFloat ? "fp32" : "bf16";
}

}  // namespace llama
