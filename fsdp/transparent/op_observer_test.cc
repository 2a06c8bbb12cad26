#include "fsdp/transparent/op_observer.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "flat_param/guarded_storage.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::GuardedStorage;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

// Remembers "0,1" for an operator on units 0 and 1, "0 nested" for one inside
// another.
class Remembering : public OpListener {
 public:
  void OnOperator(absl::Span<const int> units, bool nested) override {
    seen.push_back(
        absl::StrCat(absl::StrJoin(units, ","), nested ? " nested" : ""));
  }
  void OnWrite(const at::Tensor& tensor, int unit) override {
    seen.push_back(absl::StrCat("write of ", tensor.numel(), " to ", unit));
  }
  std::vector<std::string> seen;
};

// A 2 x 2 matrix in storage with a tag.
struct Tagged {
  Tagged(OpListener* listener, int unit) : tag{listener, unit} {
    storage.Fill(data.data());
    storage.SetTag(&tag);
    tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage.storage()),
        c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(at::kFloat));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({2, 2});
  }
  std::array<float, 4> data = {1, 2, 3, 4};
  StorageTag tag;
  GuardedStorage storage{sizeof(data), c10::Device(c10::kCPU), "freed"};
  at::Tensor tensor;
};

TEST(OpObserverTest, TellsTheUnitsOfAnOperatorOnce) {
  Remembering listener;
  Tagged a(&listener, 0);
  Tagged b(&listener, 1);
  const at::Tensor other = at::ones({2, 2});
  const OpObserver observer;
  other.neg();
  EXPECT_THAT(listener.seen, IsEmpty());
  a.tensor.neg();
  b.tensor.mul(a.tensor).mul(other);
  a.tensor.add(a.tensor);
  EXPECT_THAT(listener.seen, ElementsAre("0", "1,0", "0"));
}

TEST(OpObserverTest, SeesViewsAndListsAndOptionalTensors) {
  Remembering listener;
  Tagged a(&listener, 0);
  Tagged b(&listener, 1);
  const at::Tensor view = a.tensor.t();
  const at::Tensor row = b.tensor.select(0, 0);
  const at::Tensor x = at::ones({1, 2});
  const OpObserver observer;
  view.neg();
  at::cat({x, b.tensor, view});
  EXPECT_THAT(listener.seen, ElementsAre("0", "1,0"));
  listener.seen.clear();
  at::linear(x, at::ones({2, 2}), row);
  EXPECT_EQ(listener.seen.front(), "1");
  listener.seen.clear();
  // The indices are a list of optional tensors; zeros make a mask of false.
  a.data = {};
  const at::Tensor mask = a.tensor.view(at::kBool).select(1, 0);
  listener.seen.clear();
  x.t().index({{}, mask.narrow(0, 0, 1)});
  EXPECT_EQ(listener.seen.front(), "0");
}

TEST(OpObserverTest, TellsWhatWritesToValuesAndNothingElse) {
  Remembering listener;
  Tagged a(&listener, 0);
  Tagged b(&listener, 1);
  const at::Tensor x = at::ones({2, 2});
  const OpObserver observer;
  a.tensor.narrow(0, 0, 1).clamp_(0, 1);
  EXPECT_THAT(listener.seen, Contains("write of 2 to 0"));
  listener.seen.clear();
  at::add_out(b.tensor, a.tensor, x);
  EXPECT_THAT(listener.seen, Contains("write of 4 to 1"));
  EXPECT_THAT(listener.seen, Not(Contains("write of 4 to 0")));
  listener.seen.clear();
  at::_foreach_mul_({x, a.tensor}, 2);
  EXPECT_THAT(listener.seen, Contains("write of 4 to 0"));
  listener.seen.clear();
  at::ones({2, 2}).copy_(a.tensor);  // reads it
  a.tensor.t().squeeze_();
  EXPECT_THAT(listener.seen, Not(Contains(::testing::HasSubstr("write"))));
}

TEST(OpObserverTest, TellsOperatorsInsideOthers) {
  Remembering listener;
  Tagged a(&listener, 0);
  const OpObserver observer;
  at::linear(at::ones({3, 2}), a.tensor);
  ASSERT_GE(listener.seen.size(), 2);
  EXPECT_EQ(listener.seen[0], "0");
  EXPECT_THAT(listener.seen, Contains("0 nested"));
  listener.seen.clear();
  EXPECT_THROW(at::linear(at::ones({3, 5}), a.tensor), c10::Error);
  listener.seen.clear();
  a.tensor.neg();
  EXPECT_THAT(listener.seen, ElementsAre("0"));
}

TEST(OpObserverTest, ARangeWithoutInputsIsNoOperator) {
  Remembering listener;
  Tagged a(&listener, 0);
  const OpObserver observer;
  RECORD_FUNCTION("a block of the user's", c10::ArrayRef<c10::IValue>());
  a.tensor.neg();
  EXPECT_THAT(listener.seen, ElementsAre("0"));
}

TEST(OpObserverTest, EachListenerHearsOfItsOwnUnits) {
  Remembering first;
  Remembering second;
  Tagged a(&first, 3);
  Tagged b(&second, 4);
  Tagged c(&first, 5);
  const OpObserver observer;
  at::cat({a.tensor, b.tensor, c.tensor});
  EXPECT_THAT(first.seen, ElementsAre("3,5"));
  EXPECT_THAT(second.seen, ElementsAre("4"));
}

TEST(OpObserverTest, SeesNothingAfterTheLastIsGone) {
  Remembering listener;
  Tagged a(&listener, 0);
  {
    const OpObserver outer;
    {
      const OpObserver inner;
      a.tensor.neg();
    }
    a.tensor.neg();
  }
  a.tensor.neg();
  EXPECT_THAT(listener.seen, ElementsAre("0", "0"));
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

// Autograd's engine uses such a guard around each node.
TEST(OpObserverTest, OutlivesAGuardThatRestoresTheThreadsState) {
  Remembering listener;
  Tagged a(&listener, 0);
  const at::ThreadLocalState without;
  {
    OpObserver* observer = nullptr;
    {
      const at::ThreadLocalStateGuard guard(without);
      observer = new OpObserver();
      a.tensor.neg();
    }
    const OpObserver again;
    a.tensor.neg();
    delete observer;
    a.tensor.neg();
  }
  a.tensor.neg();
  EXPECT_THAT(listener.seen, ElementsAre("0", "0", "0"));
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(OpObserverTest, SeesThreadsThatTakeOverTheStateAndNoOthers) {
  Remembering listener;
  Tagged a(&listener, 0);
  const OpObserver observer;
  std::thread stranger([&] { a.tensor.neg(); });
  stranger.join();
  EXPECT_THAT(listener.seen, IsEmpty());
  const at::ThreadLocalState state;
  std::thread heir([&] {
    const at::ThreadLocalStateGuard guard(state);
    a.tensor.neg();
  });
  heir.join();
  EXPECT_THAT(listener.seen, ElementsAre("0"));
}

}  // namespace
}  // namespace fsdp
