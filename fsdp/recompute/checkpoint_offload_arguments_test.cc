// The arguments of regions that offload them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/offloaded_regions.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::offloaded_regions::Backward;
using ::fsdp::offloaded_regions::Host;
using ::fsdp::offloaded_regions::kDim;
using ::fsdp::offloaded_regions::kRows;
using ::fsdp::offloaded_regions::Offload;
using ::fsdp::offloaded_regions::With;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// The properties of an argument that a function sees.
struct Seen {
  explicit Seen(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()),
        requires_grad(tensor.requires_grad()),
        values(tensor.detach().to_dense().clone()) {
    if (!tensor.is_sparse()) strides = tensor.strides().vec();
  }
  bool operator==(const Seen& other) const {
    return sizes == other.sizes && strides == other.strides &&
           dtype == other.dtype && device == other.device &&
           requires_grad == other.requires_grad &&
           at::equal(values, other.values);
  }

  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  at::Tensor values;
};

struct Argument {
  std::string name;
  // Makes an argument of a tensor [kRows, kDim] that is not a leaf.
  std::function<at::Tensor(const at::Tensor&)> make;
  bool moves = true;
};

class ArgumentTest : public ::testing::TestWithParam<Argument> {};

TEST_P(ArgumentTest, IsTheSameWhenTheFunctionRunsAgain) {
  const auto run = [](const CheckpointOptions& options,
                      std::vector<Seen>* seen) {
    const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
    const at::Tensor y = CheckpointWith(
        options,
        [seen](const at::Tensor& argument, const at::Tensor& plain) {
          if (seen != nullptr) seen->emplace_back(argument);
          return argument.to(at::kFloat).sum() * plain;
        },
        GetParam().make(leaf.mul(1)), leaf);
    y.sum().backward();
    return leaf.grad();
  };
  const auto offload = Offload(Host());
  std::vector<Seen> seen;
  const at::Tensor gradient = run(With(offload), &seen);
  EXPECT_TRUE(at::equal(gradient, run({}, nullptr)));
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0] == seen[1]);
  EXPECT_EQ(offload->stats().tensors_out, GetParam().moves ? 1 : 0);
  EXPECT_EQ(offload->stats().stored_bytes, 0);
}

std::vector<Argument> Arguments() {
  using T = const at::Tensor&;
  return {
      {"Dense", [](T x) { return x; }},
      {"WithoutGrad", [](T x) { return x.detach(); }},
      {"Transposed", [](T x) { return x.t(); }},
      {"Rows", [](T x) { return x.narrow(0, 1, 2); }},
      {"Columns", [](T x) { return x.narrow(1, 1, 2); }},
      {"Expanded",
       [](T x) {
         return x.unsqueeze(0).expand({4, kRows, kDim});
       }},
      {"Scalar", [](T x) { return x.sum(); }},
      {"Half", [](T x) { return x.to(at::kHalf); }},
      {"Double", [](T x) { return x.to(at::kDouble); }},
      {"Overlapping", [](T x) { return x.reshape({-1}).unfold(0, 3, 1); },
       false},
      {"Integers", [](T x) { return x.to(at::kLong); }, false},
      {"Sparse", [](T x) { return x.to_sparse(); }, false},
      {"Empty", [](T x) { return x.narrow(0, 1, 0); }, false},
      {"LeafThatRequiresGrad",
       [](T x) { return x.detach().clone().requires_grad_(); }, false},
  };
}

INSTANTIATE_TEST_SUITE_P(Kinds, ArgumentTest, ::testing::ValuesIn(Arguments()),
                         [](const auto& info) { return info.param.name; });

TEST(ArgumentsTest, MayBeTheSameTensorAndInContainers) {
  const auto fn = [](const at::Tensor& x, const std::vector<at::Tensor>& more,
                     const std::optional<at::Tensor>& none,
                     const std::pair<at::Tensor, int>& pair) {
    EXPECT_FALSE(none.has_value());
    EXPECT_FALSE(more[1].defined());
    return at::tanh(x) * more[0] + pair.first * pair.second;
  };
  const auto run = [&](const CheckpointOptions& options) {
    const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
    const at::Tensor x = leaf.mul(2);
    CheckpointWith(options, fn, x, std::vector<at::Tensor>{x, at::Tensor()},
                   std::optional<at::Tensor>(), std::make_pair(x.detach(), 3))
        .sum()
        .backward();
    return leaf.grad();
  };
  const auto offload = Offload(Host());
  EXPECT_TRUE(at::equal(run(With(offload)), run({})));
  EXPECT_EQ(offload->stats().tensors_out, 1);
}

TEST(ArgumentsTest, OfManyRegionsAreWrittenOnce) {
  const auto run = [](const CheckpointOptions& options) {
    const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
    const at::Tensor shared = at::tanh(leaf);
    at::Tensor x = leaf.mul(2);
    for (int i = 0; i < 4; ++i) {
      x = CheckpointWith(
          options,
          [](const at::Tensor& x, const at::Tensor& shared) {
            return at::tanh(x * shared);
          },
          x, shared);
    }
    x.sum().backward();
    return leaf.grad();
  };
  const auto offload = Offload(Host());
  EXPECT_TRUE(at::equal(run(With(offload)), run({})));
  EXPECT_EQ(offload->stats().tensors_out, 5);
  EXPECT_EQ(offload->stats().stored_bytes, 0);
}

TEST(ArgumentsTest, MayBeResultsAndResultsMayBeModified) {
  const auto run = [](const CheckpointOptions& options) {
    const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
    auto [same, other] = CheckpointWith(
        options,
        [](const at::Tensor& x) { return std::make_pair(x, at::tanh(x)); },
        leaf.mul(2));
    other.mul_(3);
    (same + other).square().sum().backward();
    return leaf.grad();
  };
  EXPECT_TRUE(at::equal(run(With(Offload(Host()))), run({})));
}

TEST(ArgumentsTest, ModifiedBeforeBackwardAreRefusedWhereverTheyAre) {
  const auto offload = Offload(Host());
  for (const bool through_a_view : {false, true}) {
    const at::Tensor x = Rows(1, kRows, kDim).requires_grad_().mul(2);
    const at::Tensor y = CheckpointWith(
        With(offload), [](const at::Tensor& x) { return at::tanh(x); }, x);
    if (through_a_view) {
      x.detach().view(-1).narrow(0, 1, 1).zero_();
    } else {
      x.detach().mul_(2);
    }
    EXPECT_THAT(Backward(y.sum()),
                StatusIs(Code::kFailedPrecondition,
                         HasSubstr("tensor 0 in the arguments of a "
                                   "checkpointed region was modified in place "
                                   "between")));
  }
  EXPECT_EQ(offload->stats().tensors_out, 2);
  EXPECT_EQ(offload->stats().bytes_in, 0);
}

}  // namespace
}  // namespace fsdp
