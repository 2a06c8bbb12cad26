// EXPECT_THAT for functions that return a Status.
#ifndef BASE_TESTING_CHECK_THAT_H_
#define BASE_TESTING_CHECK_THAT_H_

#include <sstream>

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

}  // namespace fsdp::testing

#endif  // BASE_TESTING_CHECK_THAT_H_
