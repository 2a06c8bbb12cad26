// Regions with offloaded arguments compute and promise the same as without. For
// units see checkpoint_units_test.cc.
#include <ATen/ops/tanh.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <sstream>

#include "base/testing/users_error.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::testing {
namespace {

using ::fsdp::offload::HostStore;
using ::fsdp::offload::ParamStore;
using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::TemporaryFile;
using ::fsdp::offload::testing::WithFaults;

constexpr int64_t kRows = 3;
constexpr int64_t kDim = 5;

// These return stores with room for `regions` arguments of up to a page.
std::unique_ptr<ParamStore> Host(int64_t regions = 64) {
  return HostStore::Make(regions * offload::kPageBytes).value();
}

std::unique_ptr<ParamStore> File() {
  return TemporaryFile(64 * offload::kPageBytes);
}

std::shared_ptr<ActivationOffload> Offload(
    std::unique_ptr<ParamStore> store,
    absl::Duration timeout = absl::Seconds(60)) {
  ActivationOffloadOptions options = SmallOptions();
  options.timeout = timeout;
  return Make(std::move(store), options);
}

CheckpointOptions With(std::shared_ptr<ActivationOffload> offload) {
  CheckpointOptions options;
  options.offload = std::move(offload);
  return options;
}

absl::Status Backward(const at::Tensor& loss, bool retain_graph = false) {
  return TorchToStatus("backward", [&] { loss.backward({}, retain_graph); });
}

// Layers in regions of their own, one after another.
class Chain {
 public:
  explicit Chain(int length) {
    for (int i = 0; i < length; ++i) {
      layers_.push_back(Linear(kDim, kDim));
      FillParameters(*layers_.back(), 3 * i);
    }
  }

  // Returns the loss of a forward. Sets `memory` to the memory of the regions'
  // arguments.
  at::Tensor Loss(const CheckpointOptions& options,
                  std::vector<WeakStorage>* memory = nullptr) {
    at::Tensor x = input_.mul(2);
    for (Linear& layer : layers_) {
      if (memory != nullptr) memory->push_back(MemoryOf(x));
      x = CheckpointWith(
          options,
          [layer](const at::Tensor& x) mutable {
            return at::tanh(layer->forward(x));
          },
          x);
    }
    return x.square().mean();
  }

  // Returns the gradients of the parameters and the input, which then have
  // none.
  std::vector<at::Tensor> TakeGradients() {
    std::vector<at::Tensor> gradients = {input_.grad()};
    input_.mutable_grad().reset();
    for (Linear& layer : layers_) {
      for (at::Tensor& parameter : layer->parameters()) {
        gradients.push_back(parameter.grad());
        parameter.mutable_grad().reset();
      }
    }
    return gradients;
  }

 private:
  at::Tensor input_ = Rows(1, kRows, kDim).requires_grad_();
  std::vector<Linear> layers_;
};

// Returns the loss and all gradients of a step.
std::vector<at::Tensor> Step(Chain& chain, const CheckpointOptions& options) {
  const at::Tensor loss = chain.Loss(options);
  loss.backward();
  std::vector<at::Tensor> results = chain.TakeGradients();
  results.push_back(loss.detach());
  return results;
}

bool Same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined() || !b[i].defined() || !at::equal(a[i], b[i])) {
      return false;
    }
  }
  return true;
}

// Waits until `memory` is freed; returns whether it was.
bool IsFreed(ActivationOffload& offload, const WeakStorage& memory) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!memory.expired()) {
    if (absl::Now() > deadline) return false;
    offload.stats();
  }
  return true;
}

struct Store {
  std::string name;
  std::function<std::unique_ptr<ParamStore>()> make;
};

class StoreTest : public ::testing::TestWithParam<Store> {};

TEST_P(StoreTest, LossAndGradientsHaveTheBitsOfRegionsInMemory) {
  Chain chain(5);
  const auto offload = Offload(GetParam().make());
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(Same(Step(chain, With(offload)), Step(chain, {})));
  }
  EXPECT_EQ(offload->stats().failed, 0);
  EXPECT_EQ(offload->stats().full, 0);
  EXPECT_EQ(offload->stats().missed + offload->stats().prefetched +
                offload->stats().found,
            15);
  EXPECT_TRUE(StoreComesTo(*offload, 0));
}

TEST_P(StoreTest, NothingOfTheArgumentsStaysInMemory) {
  Chain chain(5);
  const auto offload = Offload(GetParam().make());
  std::vector<WeakStorage> memory;
  const at::Tensor loss = chain.Loss(With(offload), &memory);
  for (const WeakStorage& argument : memory) {
    EXPECT_TRUE(IsFreed(*offload, argument));
  }
  EXPECT_EQ(offload->stats().stored_bytes, 5 * offload::kPageBytes);
  loss.backward();
  EXPECT_EQ(offload->stats().peak_stored_bytes, 5 * offload::kPageBytes);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreTest,
                         ::testing::Values(Store{"Host", [] { return Host(); }},
                                           Store{"File", File}),
                         [](const auto& info) { return info.param.name; });

TEST(RegionTest, KeepsNoArgumentAfterItsBackwardWhereTheGraphIsRetained) {
  const auto offload = Offload(Host());
  std::vector<WeakStorage> seen;
  const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
  const at::Tensor loss = CheckpointWith(
                              With(offload),
                              [&](const at::Tensor& x) {
                                seen.push_back(MemoryOf(x));
                                return at::tanh(x);
                              },
                              leaf.mul(2))
                              .sum();
  EXPECT_TRUE(seen[0].expired());
  EXPECT_OK(Backward(loss, /*retain_graph=*/true));
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[1].expired());
  EXPECT_OK(Backward(loss));
  EXPECT_EQ(seen.size(), 3u);
  const at::Tensor plain = Rows(1, kRows, kDim).requires_grad_();
  for (int i = 0; i < 2; ++i) at::tanh(plain.mul(2)).sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), plain.grad()));
}

TEST(RegionTest, AChainOfManyRegionsIsDestroyedWithoutRecursion) {
  const auto offload = Offload(Host(20'000));
  at::Tensor x = Rows(1, kRows, kDim).requires_grad_().mul(2);
  for (int i = 0; i < 20'000; ++i) {
    x = CheckpointWith(
        With(offload), [](const at::Tensor& x) { return x + 1; }, x);
  }
  EXPECT_EQ(offload->stats().stored_bytes, 20'000 * offload::kPageBytes);
  x.reset();
  EXPECT_EQ(offload->stats().stored_bytes, 0);
}

TEST(RegionTest, ABackwardThatThrowsLeavesTheGraphUsable) {
  const auto offload = Offload(Host());
  const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
  bool fails = false;
  std::vector<WeakStorage> seen;
  at::Tensor x = leaf.mul(2);
  for (int i = 0; i < 3; ++i) {
    x = CheckpointWith(
        With(offload),
        [&fails, &seen, i](const at::Tensor& x) {
          seen.push_back(MemoryOf(x));
          if (fails && i == 1) throw UsersError("on demand");
          return at::tanh(x);
        },
        x);
  }
  at::Tensor loss = x.sum();
  x.reset();
  fails = true;
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), UsersError);
  EXPECT_TRUE(seen.back().expired());
  fails = false;
  EXPECT_OK(Backward(loss));
  const at::Tensor again = Rows(1, kRows, kDim).requires_grad_();
  again.mul(2).tanh().tanh().tanh().sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), again.grad()));
  EXPECT_EQ(offload->stats().stored_bytes, 0);
}

// For the forms of tensors see packed_form_test.cc.
TEST(ArgumentsTest, AreTheSameWhenTheFunctionRunsAgain) {
  struct Argument {
    std::string name;
    // Makes an argument of a tensor [kRows, kDim] that is not a leaf.
    std::function<at::Tensor(const at::Tensor&)> make;
    bool moves = true;
  };
  using T = const at::Tensor&;
  const std::vector<Argument> arguments = {
      {"dense", [](T x) { return x; }},
      {"without grad", [](T x) { return x.detach(); }},
      {"columns", [](T x) { return x.narrow(1, 1, 2); }},
      {"half", [](T x) { return x.to(at::kHalf); }},
      {"integers", [](T x) { return x.to(at::kLong); }, false},
      {"sparse", [](T x) { return x.to_sparse(); }, false},
      {"a leaf that requires grad",
       [](T x) { return x.detach().clone().requires_grad_(); }, false}};
  for (const Argument& argument : arguments) {
    SCOPED_TRACE(argument.name);
    std::vector<std::string> seen;
    std::vector<at::Tensor> values;
    const auto run = [&](const CheckpointOptions& options) {
      const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
      const at::Tensor y = CheckpointWith(
          options,
          [&](const at::Tensor& x, const at::Tensor& plain) {
            values.push_back(x.detach().to_dense().clone());
            std::ostringstream text;
            text << x.toString() << x.sizes() << x.requires_grad();
            if (!x.is_sparse()) text << x.strides();
            seen.push_back(text.str());
            return x.to(at::kFloat).sum() * plain;
          },
          argument.make(leaf.mul(1)), leaf);
      y.sum().backward();
      return leaf.grad();
    };
    const auto offload = Offload(Host());
    EXPECT_TRUE(at::equal(run(With(offload)), run({})));
    ASSERT_EQ(seen.size(), 4u);
    EXPECT_THAT(seen, Each(seen[0]));
    for (const at::Tensor& each : values) {
      EXPECT_TRUE(at::equal(each, values[0]));
    }
    EXPECT_EQ(offload->stats().tensors_out, argument.moves ? 1 : 0);
    EXPECT_EQ(offload->stats().stored_bytes, 0);
  }
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
    const at::Tensor y = CheckpointWith(With(offload), at::tanh, x);
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

class FaultTest : public ::testing::TestWithParam<Fault::Effect> {};

TEST_P(FaultTest, AnyReadThatFailsForGoodFailsBackwardWhichMayBeTriedAgain) {
  Chain chain(4);
  const std::vector<at::Tensor> expected = Step(chain, {});
  for (int64_t nth = 0; nth < 4; ++nth) {
    // The first read is needed at once; the others read ahead.
    const int64_t count = nth == 0 ? 1 : 2;
    const auto offload = Offload(WithFaults(
        Host(), {FaultOf(Fault::Operation::kRead, GetParam(), nth, count)}));
    at::Tensor loss = chain.Loss(With(offload));
    EXPECT_THAT(
        Backward(loss, /*retain_graph=*/true),
        StatusIs(Code::kUnavailable,
                 AllOf(HasSubstr("move tensor 0 in the arguments of a "
                                 "checkpointed region, Float [3, 5] on cpu"),
                       HasSubstr(absl::StrCat(
                           "read region 'activation ", 2 * (3 - nth),
                           " of a checkpointed region', offset 0, 60 bytes")),
                       HasSubstr("injected failure"))));
    chain.TakeGradients();
    EXPECT_OK(Backward(loss));
    std::vector<at::Tensor> results = chain.TakeGradients();
    results.push_back(loss.detach());
    EXPECT_TRUE(Same(results, expected)) << nth;
    loss.reset();
    EXPECT_EQ(offload->stats().stored_bytes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Effects, FaultTest,
                         ::testing::Values(Fault::Effect::kRefuse,
                                           Fault::Effect::kFail,
                                           Fault::Effect::kShorten));

}  // namespace
}  // namespace fsdp::testing
