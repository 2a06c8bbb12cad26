#include "fsdp/testing/check_tensor.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fsdp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor Flat(const at::Tensor& tensor) {
  return tensor.detach().cpu().to(at::kDouble).reshape({-1});
}

absl::Status Undefined(const at::Tensor& actual, absl::string_view what) {
  return absl::InternalError(absl::StrCat(
      what, ": ", actual.defined() ? "expected" : "got", " no tensor"));
}

absl::Status Differs(const at::Tensor& actual, const at::Tensor& expected,
                     double rtol, double atol, absl::string_view what) {
  if (actual.sizes() != expected.sizes()) {
    return absl::InternalError(absl::StrCat(
        what, ": expected sizes [", absl::StrJoin(expected.sizes(), ", "),
        "], got [", absl::StrJoin(actual.sizes(), ", "), "]"));
  }
  const at::Tensor a = Flat(actual);
  const at::Tensor e = Flat(expected);
  // NaN counts as the largest difference.
  const at::Tensor excess = a.sub(e)
                                .abs()
                                .sub(e.abs().mul(rtol).add(atol))
                                .masked_fill(a.eq(e), -kInfinity);
  const int64_t worst = excess.argmax().item<int64_t>();
  const int64_t count = excess.le(0).logical_not().sum().item<int64_t>();
  std::vector<int64_t> place(actual.dim());
  int64_t rest = worst;
  for (int64_t i = actual.dim() - 1; i >= 0; --i) {
    place[i] = rest % actual.size(i);
    rest /= actual.size(i);
  }
  const double from = e[worst].item<double>();
  const double to = a[worst].item<double>();
  return absl::InternalError(absl::StrCat(
      what, ": expected ", from, " at [", absl::StrJoin(place, ", "), "], got ",
      to, ", which is off by ", to - from, ", the most of ", count, " of ",
      a.numel(), " values that are off"));
}

}  // namespace

absl::Status CheckTensor(const at::Tensor& actual, const at::Tensor& expected,
                         absl::string_view what) {
  if (!actual.defined() || !expected.defined()) return Undefined(actual, what);
  if (at::equal(actual, expected)) return absl::OkStatus();
  return Differs(actual, expected, 0, 0, what);
}

absl::Status CheckTensor(const at::Tensor& actual, const at::Tensor& expected,
                         double rtol, double atol, absl::string_view what) {
  if (!actual.defined() || !expected.defined()) return Undefined(actual, what);
  if (at::allclose(actual, expected, rtol, atol)) return absl::OkStatus();
  return Differs(actual, expected, rtol, atol, what);
}

}  // namespace fsdp::testing
