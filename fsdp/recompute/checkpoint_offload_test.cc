// Regions with offloaded arguments compute and promise the same as without. For
// units see checkpoint_offload_units_test.cc.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "base/testing/users_error.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/offloaded_regions.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::offload::ParamStore;
using ::fsdp::offloaded_regions::Backward;
using ::fsdp::offloaded_regions::Chain;
using ::fsdp::offloaded_regions::File;
using ::fsdp::offloaded_regions::Host;
using ::fsdp::offloaded_regions::kDim;
using ::fsdp::offloaded_regions::kRows;
using ::fsdp::offloaded_regions::MemoryOf;
using ::fsdp::offloaded_regions::Offload;
using ::fsdp::offloaded_regions::Same;
using ::fsdp::offloaded_regions::Step;
using ::fsdp::offloaded_regions::WeakStorage;
using ::fsdp::offloaded_regions::With;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StoreComesTo;
using ::fsdp::testing::UsersError;

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

TEST_P(StoreTest, AGraphThatIsDroppedLeavesNothingInTheStore) {
  Chain chain(5);
  const auto offload = Offload(GetParam().make());
  at::Tensor loss = chain.Loss(With(offload));
  loss.reset();
  EXPECT_TRUE(StoreComesTo(*offload, 0));
}

TEST_P(StoreTest, ARetainedGraphHasASecondBackward) {
  Chain chain(4);
  const auto offload = Offload(GetParam().make());
  const at::Tensor loss = chain.Loss(With(offload));
  loss.backward({}, /*retain_graph=*/true);
  const std::vector<at::Tensor> first = chain.TakeGradients();
  loss.backward();
  EXPECT_TRUE(Same(chain.TakeGradients(), first));
  EXPECT_TRUE(StoreComesTo(*offload, 0));
}

TEST_P(StoreTest, BackwardMayRunOnAnotherThread) {
  Chain chain(5);
  const auto offload = Offload(GetParam().make());
  const std::vector<at::Tensor> expected = Step(chain, {});
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> results;
    at::Tensor loss = chain.Loss(With(offload));
    std::thread([&] {
      loss.backward();
      results = chain.TakeGradients();
      results.push_back(loss.detach());
      loss.reset();
    }).join();
    EXPECT_TRUE(Same(results, expected));
  }
}

TEST_P(StoreTest, AGraphKeepsTheOffloadAlive) {
  Chain chain(3);
  const std::vector<at::Tensor> expected = Step(chain, {});
  const at::Tensor loss = chain.Loss(With(Offload(GetParam().make())));
  loss.backward();
  std::vector<at::Tensor> results = chain.TakeGradients();
  results.push_back(loss.detach());
  EXPECT_TRUE(Same(results, expected));
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

at::Tensor Deep(const CheckpointOptions& options, int depth,
                const at::Tensor& x) {
  at::Tensor y = at::tanh(x);
  if (depth == 0) return y;
  return CheckpointWith(
      options,
      [options, depth](const at::Tensor& y) {
        const at::Tensor z = Deep(options, depth - 1, y);
        return CheckpointWith(
            options, [](const at::Tensor& z) { return at::tanh(z); }, z);
      },
      y);
}

TEST(RegionTest, RegionsMayBeNested) {
  const auto run = [](const CheckpointOptions& options) {
    const at::Tensor leaf = Rows(1, kRows, kDim).requires_grad_();
    Deep(options, 4, leaf).sum().backward();
    return leaf.grad();
  };
  for (const Store& store :
       {Store{"", [] { return Host(); }}, Store{"", File}}) {
    const auto offload = Offload(store.make());
    EXPECT_TRUE(at::equal(run(With(offload)), run({})));
    EXPECT_TRUE(StoreComesTo(*offload, 0));
    const ActivationOffloadStats stats = offload->stats();
    EXPECT_GT(stats.found + stats.prefetched + stats.missed, 4);
  }
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

}  // namespace
}  // namespace fsdp
