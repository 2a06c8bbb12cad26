#include "examples/llama/flags/base.h"

#include <string>

#include "absl/strings/string_view.h"

namespace llama {

bool AbslParseFlag(absl::string_view text, Base* base, std::string* error) {
  if (text != "precision" && text != "int8") {
    *error = "expected precision or int8";
    return false;
  }
  *base = text == "int8" ? Base::kInt8 : Base::kPrecision;
  return true;
}

std::string AbslUnparseFlag(Base base) {
  return base == Base::kInt8 ? "int8" : "precision";
}

}  // namespace llama
