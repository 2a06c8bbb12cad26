
#include <memory>
#include <utility>

#include "absl/strings/cord.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::Status ReturnIfError(const absl::Status& status, bool* went_on) {
  FSDP_RETURN_IF_ERROR(status);
  *went_on = true;
  return absl::OkStatus();
}

TEST(ReturnIfErrorTest, ReturnsTheErrorAndGoesOnWhenOk) {
  bool went_on = false;
  EXPECT_THAT(ReturnIfError(absl::NotFoundError("x"), &went_on),
              StatusIs(absl::StatusCode::kNotFound, "x"));
  EXPECT_FALSE(went_on);
  EXPECT_OK(ReturnIfError(absl::OkStatus(), &went_on));
  EXPECT_TRUE(went_on);
}

TEST(ReturnIfErrorTest, EvaluatesItsArgumentOnceAndBindsToTheRightElse) {
  int evaluations = 0;
  auto ok = [&evaluations] {
    ++evaluations;
    return absl::OkStatus();
  };
  auto run = [&](bool condition) -> absl::Status {
    if (condition)
      FSDP_RETURN_IF_ERROR(ok());
    else
      return absl::AbortedError("else");
    return absl::OkStatus();
  };
  EXPECT_OK(run(true));
  EXPECT_EQ(evaluations, 1);
  EXPECT_THAT(run(false), StatusIs(absl::StatusCode::kAborted, "else"));
}

absl::StatusOr<int> AssignOrReturn(
    absl::StatusOr<std::unique_ptr<int>> source) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<int> value, std::move(source));
  FSDP_ASSIGN_OR_RETURN(*value, absl::StatusOr<int>(*value + 1));
  return *value;
}

TEST(AssignOrReturnTest, MovesTheValueOrReturnsTheError) {
  absl::StatusOr<int> result = AssignOrReturn(std::make_unique<int>(6));
  ASSERT_OK(result);
  EXPECT_EQ(*result, 7);
  EXPECT_THAT(AssignOrReturn(absl::InternalError("no value")),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("no value")));
}

TEST(AnnotateTest, PrefixesTheMessageAndKeepsCodeAndPayload) {
  absl::Status status = absl::NotFoundError("file");
  status.SetPayload("key", absl::Cord("value"));
  absl::Status annotated = Annotate(status, "reading init");
  EXPECT_THAT(annotated,
              StatusIs(absl::StatusCode::kNotFound, "reading init: file"));
  EXPECT_EQ(annotated.GetPayload("key"), absl::Cord("value"));
  EXPECT_OK(Annotate(absl::OkStatus(), "anything"));
  EXPECT_EQ(*Annotate(absl::StatusOr<int>(3), "anything"), 3);
  EXPECT_EQ(Annotate(absl::StatusOr<int>(status), "reading init").status(),
            annotated);
}

TEST(ValueOrThrowTest, ReturnsTheValueOrThrowsTheStatus) {
  EXPECT_EQ(ValueOrThrow(absl::StatusOr<int>(3)), 3);
  EXPECT_THROW(ValueOrThrow(absl::StatusOr<int>(absl::AbortedError("a"))),
               StatusError);
}

}  // namespace
}  // namespace fsdp
