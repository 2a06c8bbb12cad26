#include "fsdp/testing/check_tensor.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "base/testing/status_matchers.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

TEST(CheckTensorTest, SaysWhereItIsOffMost) {
  const at::Tensor expected = at::arange(6, at::kFloat).reshape({2, 3});
  const at::Tensor actual = expected.clone();
  EXPECT_OK(CheckTensor(actual, expected, "rows"));
  actual[0][1].fill_(1.25);
  actual[1][2].fill_(4.5);
  EXPECT_THAT(CheckTensor(actual, expected, "rows"),
              StatusIs(absl::StatusCode::kInternal,
                       "rows: expected 5 at [1, 2], got 4.5, which is off by "
                       "-0.5, the most of 2 of 6 values that are off"));
  EXPECT_OK(CheckTensor(actual, expected, 0, 0.5, "rows"));
  // The element that is off most relative to its size is named.
  EXPECT_THAT(CheckTensor(actual, expected, 0.11, 0, "rows"),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("expected 1 at [0, 1], got 1.25")));
}

TEST(CheckTensorTest, NanIsOffMost) {
  const at::Tensor actual = at::zeros({3});
  actual[0].fill_(7);
  actual[1].fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_THAT(CheckTensor(actual, at::zeros({3}), "values"),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("expected 0 at [1], got nan")));
}

TEST(CheckTensorTest, NamesSizesAndWhatIsUndefined) {
  const at::Tensor two = at::zeros({2});
  EXPECT_THAT(CheckTensor(at::zeros({3}), two, "values"),
              StatusIs(absl::StatusCode::kInternal,
                       "values: expected sizes [2], got [3]"));
  EXPECT_THAT(CheckTensor(at::Tensor(), two, "values"),
              StatusIs(absl::StatusCode::kInternal, "values: got no tensor"));
  EXPECT_THAT(
      CheckTensor(two, at::Tensor(), 0, 1, "values"),
      StatusIs(absl::StatusCode::kInternal, "values: expected no tensor"));
}

}  // namespace
}  // namespace fsdp::testing
