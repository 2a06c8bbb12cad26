// LibTorch's warnings of this thread, as texts.
#ifndef BASE_TESTING_WARNINGS_H_
#define BASE_TESTING_WARNINGS_H_

#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"

namespace fsdp::testing {

// Collects warnings while a c10::WarningUtils::WarningHandlerGuard has it.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }

  std::string text() const { return absl::StrJoin(texts, "\n"); }

  std::vector<std::string> texts;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_WARNINGS_H_
