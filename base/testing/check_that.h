// For functions that return a Status: what runs on a rank cannot use
// GoogleTest's assertions.
#ifndef BASE_TESTING_CHECK_THAT_H_
#define BASE_TESTING_CHECK_THAT_H_

#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"

namespace fsdp::testing {

// Returns OK if `value` matches, otherwise Internal with `what`, what was
// expected of it, and its value.
template <typename T, typename Matcher>
absl::Status CheckThat(const T& value, const Matcher& matcher,
                       absl::string_view what) {
  const auto matches = ::testing::SafeMatcherCast<const T&>(matcher);
  ::testing::StringMatchResultListener why;
  if (matches.MatchAndExplain(value, &why)) return absl::OkStatus();
  std::ostringstream text;
  text << what << ": expected what ";
  matches.DescribeTo(&text);
  text << ", got " << ::testing::PrintToString(value);
  if (!why.str().empty()) text << ", " << why.str();
  return absl::InternalError(text.str());
}

// Returns OK if `condition`, otherwise Internal with the text `what`.
inline absl::Status Check(bool condition, const std::string& what) {
  return condition ? absl::OkStatus() : absl::InternalError(what);
}

}  // namespace fsdp::testing

#endif  // BASE_TESTING_CHECK_THAT_H_
