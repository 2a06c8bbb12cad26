// Reads for tests what Python's programs have recorded.
#ifndef EXAMPLES_LLAMA_TESTING_RECORDED_JSON_H_
#define EXAMPLES_LLAMA_TESTING_RECORDED_JSON_H_

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"

namespace llama {

// Returns the path of a file or folder.
inline std::string Recorded(absl::string_view name) {
  return absl::StrCat("examples/llama/testing/recorded/", name);
}

inline fsdp::Json RecordedJson(absl::string_view name) {
  std::ifstream file(Recorded(name));
  const auto json =
      fsdp::Json::Parse(std::string(std::istreambuf_iterator<char>(file), {}));
  EXPECT_OK(json) << name;
  return json.value_or(fsdp::Json());
}

inline std::vector<double> NumbersIn(const fsdp::Json& list) {
  std::vector<double> numbers;
  for (const fsdp::Json& one : *list.As<fsdp::Json::Array>()) {
    numbers.push_back(one.NumberOr(-1));
  }
  return numbers;
}

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TESTING_RECORDED_JSON_H_
