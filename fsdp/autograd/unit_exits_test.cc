// The events that a unit's nodes report, and when; recomputations.
#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/autograd/autograd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Log final : public BackwardListener {
 public:
  void OnPreBackward(const PreBackwardInfo& info) override {
    events.push_back(absl::StrCat("enters ", info.unit));
  }
  void OnPostBackward(const PostBackwardInfo& info,
                      std::vector<at::Tensor> of_slots) override {
    events.push_back(absl::StrCat("has gradients of ", info.unit));
    gradients = std::move(of_slots);
  }
  void OnLeft(uint64_t) override { events.push_back("leaves"); }

  std::vector<std::string> events;
  std::vector<at::Tensor> gradients;
};

class UnitExitsTest : public ::testing::Test {
 protected:
  UnitExitsTest() : log_(std::make_shared<Log>()) {}

  at::Tensor Leaf() { return at::ones({4}).requires_grad_(); }

  // Begins a forward; must be called before its first operator.
  UnitForward Begin(int unit) {
    return {unit, absl::StrCat("u", unit), at::sequence_number::peek(),
            nullptr};
  }
  size_t End(const UnitForward& forward, std::vector<at::Tensor> outputs,
             const SeenTensors& inputs = {}) {
    std::vector<at::Tensor*> pointers;
    pointers.reserve(outputs.size());
    for (at::Tensor& output : outputs) pointers.push_back(&output);
    return AttachExits(log_, forward, pointers, inputs).size();
  }
  std::vector<std::string> TakeEvents() {
    return std::exchange(log_->events, {});
  }

  const std::shared_ptr<Log> log_;
};

TEST_F(UnitExitsTest, TellOncePerBackwardWhicheverComesFirst) {
  const at::Tensor x = Leaf() * 2;
  const UnitForward forward = Begin(3);
  const at::Tensor first = x * 2;
  const at::Tensor second = x * 3;
  EXPECT_EQ(End(forward, {first, second}), 2);
  const at::Tensor loss = (first * second).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 3"));
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 3"));
  first.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 3"));
}

TEST_F(UnitExitsTest, OfAnOuterUnitTellBeforeThoseOfAnInnerOne) {
  const at::Tensor x = Leaf() * 2;
  const UnitForward outer = Begin(1);
  const at::Tensor y = x * 2;
  const UnitForward inner = Begin(2);
  const at::Tensor z = y * 2;
  EXPECT_EQ(End(inner, {z}), 1);
  EXPECT_EQ(End(outer, {z}), 1);
  z.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 1", "enters 2"));
}

TEST_F(UnitExitsTest, AreNotAtNodesFromBeforeTheForward) {
  const at::Tensor leaf = Leaf();
  const at::Tensor x = leaf * 2;
  const UnitForward forward = Begin(0);
  EXPECT_EQ(End(forward, {x, leaf, at::ones({2}), at::Tensor()}), 0);
  x.sum().backward();
  EXPECT_THAT(TakeEvents(), IsEmpty());
}

TEST_F(UnitExitsTest, SurviveThatAViewIsModified) {
  const at::Tensor x = Leaf() * 2;
  const UnitForward forward = Begin(0);
  const at::Tensor view = (x * 2).narrow(0, 0, 2);
  EXPECT_EQ(End(forward, {view}), 2);
  view.mul_(3);
  view.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 0"));
}

TEST_F(UnitExitsTest, AreAtInputsThatTheForwardHasModified) {
  const at::Tensor x = Leaf() * 2;
  const UnitForward forward = Begin(0);
  SeenTensors inputs;
  {
    // The view is gone when the forward ends, its base is not.
    const at::Tensor view = x.narrow(0, 0, 2);
    inputs.Add(view);
    view.mul_(3);
  }
  EXPECT_EQ(End(forward, {}, inputs), 1);
  x.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 0"));
}

TEST_F(UnitExitsTest, InputsAreNotKeptAlive) {
  SeenTensors inputs;
  at::Tensor x = at::ones({4});
  inputs.Add(x);
  EXPECT_EQ(inputs.Alive().size(), 1);
  x.reset();
  EXPECT_THAT(inputs.Alive(), IsEmpty());
}

TEST_F(UnitExitsTest, EntriesTellWhenTheGradientLeaves) {
  const at::Tensor x = Leaf() * 2;
  const UnitForward forward = Begin(0);
  AttachEntry(log_, forward.start_sequence, x);
  const at::Tensor y = x * 2;
  EXPECT_EQ(End(forward, {y}), 1);
  (y * 3).sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 0", "leaves"));
}

// A leaf has no node, but a view of it has one.
TEST_F(UnitExitsTest, EntriesAreAtViewsOfLeaves) {
  const at::Tensor x = Leaf().narrow(0, 0, 2);
  const UnitForward forward = Begin(0);
  AttachEntry(log_, forward.start_sequence, x);
  const at::Tensor y = x * 2;
  EXPECT_EQ(End(forward, {y}), 1);
  y.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 0", "leaves"));
}

TEST_F(UnitExitsTest, AUnitGetsTheGradientsOfItsSlots) {
  const at::Tensor first = Leaf(), one = Leaf(), another = Leaf();
  UnitForward forward = Begin(7);
  forward.unit_node =
      AttachUnitNode(log_, 7, "u7", {{first}, {}, {one, another}, {Leaf()}});
  const at::Tensor y = first * 2 + one * 3 + another * 5;
  EXPECT_EQ(End(forward, {y}), 1);
  y.sum().backward();
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 7", "has gradients of 7"));
  ASSERT_EQ(log_->gradients.size(), 4);
  EXPECT_TRUE(at::equal(log_->gradients[0], at::full({4}, 2.0f)));
  EXPECT_FALSE(log_->gradients[1].defined());
  EXPECT_TRUE(at::equal(log_->gradients[2], at::full({4}, 8.0f)));
  EXPECT_FALSE(log_->gradients[3].defined());
}

template <typename Function>
std::string TextOf(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing is thrown";
}

TEST_F(UnitExitsTest, WhatIsRefusedIsSoBeforeTheUnitIsEntered) {
  const at::Tensor x = Leaf(), weight = Leaf();
  UnitForward forward = Begin(5);
  forward.unit_node = AttachUnitNode(log_, 5, "u5", {{weight}});
  const at::Tensor loss = (x * weight).sum();
  EXPECT_EQ(End(forward, {loss}), 1);
  EXPECT_THAT(
      TextOf([&] { torch::autograd::grad({loss}, {weight}, {}, true); }),
      HasSubstr("with respect to a parameter of unit u5"));
  EXPECT_THAT(TextOf([&] { loss.backward({}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph=true through unit u5"));
  EXPECT_THAT(TakeEvents(), IsEmpty());
  // The gradient of an input is permitted.
  EXPECT_TRUE(
      at::equal(torch::autograd::grad({loss}, {x}, {}, true)[0], weight));
  EXPECT_THAT(TakeEvents(), ElementsAre("enters 5"));
}

// Tests of what a recomputation undoes, and of the order in which it ends.
TEST(RecomputeScopeTest, ABufferGetsTheValueThatItHadBeforeItWasFirstKept) {
  at::Tensor buffer = at::full({2}, 1.0);
  {
    RecomputeScope scope({}, /*restores_buffers=*/true);
    scope.KeepBuffers({at::Tensor(), buffer});
    buffer.fill_(2);
    scope.KeepBuffers({buffer});  // a second unit has it, too
    buffer.fill_(3);
  }
  EXPECT_EQ(buffer[0].item<float>(), 1);
}

TEST(RecomputeScopeTest, TheLastThatWasAskedForIsCalledFirst) {
  std::vector<int> calls;
  RecomputeScope scope({}, /*restores_buffers=*/false);
  for (int i : {1, 2, 3}) {
    scope.AtEnd([&calls, i] { calls.push_back(i); });
  }
  scope.Finish();
  EXPECT_THAT(calls, ElementsAre(3, 2, 1));
}

}  // namespace
}  // namespace fsdp
