// The allocations of a fused optimizer's first step, and the calls of a step.
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "absl/strings/string_view.h"
#include "fsdp/testing/fused_optimizer_cases.h"
#include "fsdp/testing/memory_meter.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FusedOptimizerTest;
using ::fsdp::testing::Kind;
using ::fsdp::testing::Kinds;
using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::Of;
using ::fsdp::testing::Shards;
using ::fsdp::testing::Sizes;

INSTANTIATE_TEST_SUITE_P(Kinds, FusedOptimizerTest,
                         ::testing::ValuesIn(Kinds()),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

int64_t BytesAllocatedBy(const std::function<void()>& fn) {
  const auto counter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
  fn();
  return counter->allocated();
}

TEST_P(FusedOptimizerTest, AllocatesItsStatesOnceAndNothingAfterwards) {
  Shards shards(Sizes());
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  shards.SetGradients(0);
  const int64_t first = BytesAllocatedBy([&] { optimizer->step(); });
  constexpr int64_t kAligned = 64;
  // The first step allocates at most three tensors like the parameters, the
  // ends of runs and a number.
  EXPECT_LE(first, 3 * (4 * shards.values.numel() + kAligned) + 5 * kAligned +
                       kAligned);
  for (int step = 1; step < 4; ++step) {
    shards.SetGradients(step);
    EXPECT_EQ(BytesAllocatedBy([&] { optimizer->step(); }), 0) << step;
  }
}

// Returns the numbers of tensors in the calls of fused kernels.
std::vector<size_t> CallsBy(const std::function<void()>& fn) {
  static thread_local std::vector<size_t>* calls = nullptr;
  std::vector<size_t> result;
  calls = &result;
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (absl::string_view(function.name()).substr(0, 13) ==
            "aten::_fused_") {
          calls->push_back(function.inputs()[0].toTensorVector().size());
        }
        return nullptr;
      })
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION}));
  fn();
  at::removeCallback(handle);
  return result;
}

TEST_P(FusedOptimizerTest, MergesNeighboursIntoOneTensorOfOneCall) {
  Shards shards({16, 3, 0, 29, 64, 1000, 5, 11});  // 1128 is 70 vectors and 8
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  shards.SetGradients(0);
  // One run has whole vectors, the other the remaining elements.
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::ElementsAre(2));
  shards.SetGradients(1, [](size_t i) { return i != 3; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::ElementsAre(3));
  shards.SetGradients(2, [](size_t) { return false; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::IsEmpty());
}

// Fails an allocation while it lives: the first one, or the one after some.
class FailingAllocator : public c10::Allocator {
 public:
  explicit FailingAllocator(int before)
      : before_(before), real_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this);
  }
  ~FailingAllocator() override { c10::SetCPUAllocator(real_); }

  c10::DataPtr allocate(size_t bytes) override {
    if (before_-- == 0) throw std::bad_alloc();
    return real_->allocate(bytes);
  }
  void copy_data(void* dest, const void* src,
                 std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool has_failed() const { return before_ < 0; }

 private:
  int before_;
  c10::Allocator* const real_;
};

// Returns whether the first step runs out of memory at its allocation `index`;
// the next steps must be exact then.
bool FailsAt(int index, const Kind& kind) {
  Shards expected({3, 100, 1});
  Shards shards({3, 100, 1});
  const auto unbroken = Of(kind.make_fused, expected.leaves);
  const auto optimizer = Of(kind.make_fused, shards.leaves);
  shards.SetGradients(0);
  bool failed = false;
  {
    const FailingAllocator allocator(index);
    try {
      optimizer->step();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    EXPECT_EQ(failed, allocator.has_failed());
  }
  if (!failed) return false;
  for (int step = 0; step < 3; ++step) {
    const auto has = [&](size_t i) { return step != 0 || i != 0; };
    expected.SetGradients(step, has);
    shards.SetGradients(step, has);
    unbroken->step();
    optimizer->step();
  }
  EXPECT_TRUE(shards.All().equal(expected.All())) << index;
  return true;
}

TEST_P(FusedOptimizerTest, StepsAsIfNothingWasAfterRunningOutOfMemory) {
  int failures = 0;
  while (FailsAt(failures, GetParam())) ++failures;
  EXPECT_GE(failures, 2);  // the ends of runs and a number, besides slots
}

}  // namespace
}  // namespace fsdp
