// GoogleMock matchers and assertions for absl::Status and absl::StatusOr.
//   ASSERT_OK(Connect());
//   EXPECT_THAT(Load(path), StatusIs(absl::StatusCode::kNotFound,
//                                    HasSubstr(path)));
//   ASSERT_OK_AND_ASSIGN(auto layout, FlatLayout::Create(...));
// A test that includes this header has GoogleTest, GoogleMock and what returns
// and passes on an absl::Status too.
#ifndef BASE_TESTING_STATUS_MATCHERS_H_
#define BASE_TESTING_STATUS_MATCHERS_H_

#include <string>
#include <utility>

#include "absl/status/status.h"    // IWYU pragma: export
#include "absl/status/statusor.h"  // IWYU pragma: export
#include "base/status_macros.h"    // IWYU pragma: export
#include "gmock/gmock.h"           // IWYU pragma: export
#include "gtest/gtest.h"           // IWYU pragma: export

namespace fsdp::testing {

inline const absl::Status& GetStatus(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

// Matches an OK Status or a StatusOr that holds a value.
MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  *result_listener << GetStatus(arg);
  return GetStatus(arg).ok();
}

// Matches the code and, by a matcher of strings, the message.
MATCHER_P2(StatusIs, code, message_matcher,
           "has code " + absl::StatusCodeToString(code) +
               " and a message that " +
               ::testing::DescribeMatcher<std::string>(message_matcher)) {
  const absl::Status& status = GetStatus(arg);
  *result_listener << status;
  return status.code() == code &&
         ::testing::ExplainMatchResult(
             message_matcher, std::string(status.message()), result_listener);
}

}  // namespace fsdp::testing

#define EXPECT_OK(expr) EXPECT_THAT((expr), ::fsdp::testing::IsOk())
#define ASSERT_OK(expr) ASSERT_THAT((expr), ::fsdp::testing::IsOk())

#define ASSERT_OK_AND_ASSIGN(lhs, expr) \
  ASSERT_OK_AND_ASSIGN_IMPL_(           \
      FSDP_STATUS_MACROS_CONCAT_(assert_ok_result_, __LINE__), lhs, expr)
#define ASSERT_OK_AND_ASSIGN_IMPL_(result, lhs, expr) \
  auto result = (expr);                               \
  ASSERT_THAT(result, ::fsdp::testing::IsOk());       \
  lhs = *std::move(result)

#endif  // BASE_TESTING_STATUS_MATCHERS_H_
