#include "fsdp/model/precision_switch.h"

#include <ATen/ops/ones.h>

#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

MixedPrecision In(c10::ScalarType dtype, CastInputs cast_inputs,
                  bool full_in_eval = false) {
  MixedPrecision precision;
  precision.param_dtype = dtype;
  precision.cast_inputs = cast_inputs;
  precision.full_precision_in_eval = full_in_eval;
  return precision;
}

// A root, a unit that is full in eval mode, and one that never is.
class PrecisionSwitchTest : public ::testing::Test {
 protected:
  using Change = std::pair<std::vector<int>, bool>;

  PrecisionSwitchTest() {
    std::vector<MixedPrecision> units = {
        In(c10::kBFloat16, CastInputs::kRoot, /*full_in_eval=*/true),
        In(c10::kBFloat16, CastInputs::kEveryUnit, /*full_in_eval=*/true),
        In(c10::kHalf, CastInputs::kEveryUnit)};
    units[0].output_dtype = c10::kDouble;
    switch_ = std::make_unique<PrecisionSwitch>(
        std::move(units),
        std::vector<CastBuffer>{
            {"mean", buffer_, c10::kFloat, c10::kBFloat16, /*unit=*/0}},
        [this] { return training_; });
  }

  absl::Status Follow(absl::Status answer = absl::OkStatus()) {
    return switch_->FollowMode(
        [&](absl::Span<const int> units, bool full) -> absl::Status {
          changes_.push_back({{units.begin(), units.end()}, full});
          return answer;
        });
  }

  c10::ScalarType InputOf(int unit, c10::ScalarType dtype) {
    at::Tensor input = at::ones({2}, dtype);
    if (switch_->CastsInputs(unit)) switch_->CastInputs(unit, {&input});
    return input.scalar_type();
  }
  c10::ScalarType OutputOf(int unit) {
    at::Tensor output = at::ones({2});
    switch_->CastOutputs(unit, {&output});
    return output.scalar_type();
  }

  bool training_ = true;
  at::Tensor buffer_ = at::ones({3});
  std::vector<Change> changes_;
  std::unique_ptr<PrecisionSwitch> switch_;
};

TEST_F(PrecisionSwitchTest, TrainingCastsWhatOptionsSay) {
  EXPECT_EQ(buffer_.scalar_type(), c10::kBFloat16);
  ASSERT_OK(Follow());
  EXPECT_THAT(changes_, ElementsAre());
  EXPECT_EQ(InputOf(0, c10::kFloat), c10::kBFloat16);
  EXPECT_EQ(InputOf(2, c10::kFloat), c10::kHalf);
  EXPECT_EQ(InputOf(2, c10::kLong), c10::kLong);
  EXPECT_EQ(OutputOf(0), c10::kDouble);
  EXPECT_EQ(OutputOf(1), c10::kFloat);
}

TEST_F(PrecisionSwitchTest, AFailedChangeIsTriedAgain) {
  training_ = false;
  EXPECT_THAT(Follow(absl::AbortedError("lost")),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("lost")));
  EXPECT_EQ(buffer_.scalar_type(), c10::kBFloat16);
  EXPECT_EQ(InputOf(1, c10::kFloat), c10::kBFloat16);
  ASSERT_OK(Follow());
  EXPECT_THAT(changes_, ElementsAre(Pair(ElementsAre(0, 1), true),
                                    Pair(ElementsAre(0, 1), true)));
  EXPECT_EQ(buffer_.scalar_type(), c10::kFloat);
  EXPECT_EQ(InputOf(1, c10::kFloat), c10::kFloat);
  EXPECT_EQ(InputOf(2, c10::kFloat), c10::kHalf);
  EXPECT_EQ(OutputOf(0), c10::kFloat);
}

TEST_F(PrecisionSwitchTest, RefusesGraphsOfAnotherPrecision) {
  EXPECT_OK(switch_->CheckGraph(1, "one", /*in_full_precision=*/false));
  training_ = false;
  ASSERT_OK(Follow());
  EXPECT_TRUE(switch_->InFullPrecision(1));
  EXPECT_OK(switch_->CheckGraph(1, "one", /*in_full_precision=*/true));
  EXPECT_THAT(switch_->CheckGraph(1, "one", /*in_full_precision=*/false),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("backward through unit one")));
  EXPECT_FALSE(switch_->InFullPrecision(2));
  EXPECT_OK(switch_->CheckGraph(2, "two", /*in_full_precision=*/false));
}

TEST(PrecisionSwitchAloneTest, ForcesInputsToFp32) {
  MixedPrecision precision;
  precision.force_input_to_fp32 = true;
  const PrecisionSwitch always({precision}, {}, nullptr);
  EXPECT_TRUE(always.is_training());
  for (const auto& [dtype, expected] :
       std::vector<std::pair<c10::ScalarType, c10::ScalarType>>{
           {c10::kHalf, c10::kFloat},
           {c10::kBFloat16, c10::kFloat},
           {c10::kDouble, c10::kDouble},
           {c10::kInt, c10::kInt}}) {
    at::Tensor input = at::ones({2}, dtype);
    ASSERT_TRUE(always.CastsInputs(0));
    always.CastInputs(0, {&input});
    EXPECT_EQ(input.scalar_type(), expected);
  }
}

}  // namespace
}  // namespace fsdp
