#include "fsdp/memory/memory_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

// Returns a root of 100 bytes and layers of 1000, over 4 ranks.
std::vector<UnitBytes> BytesOf(int layers) {
  std::vector<UnitBytes> bytes;
  for (int i = 0; i <= layers; ++i) {
    UnitBytes& unit = bytes.emplace_back();
    const int64_t whole = i == 0 ? 100 : 1000;
    unit.unsharded = {whole};
    unit.shard = unit.gradient = whole / 4;
    unit.reduce_buffers = {whole + 8};
  }
  return bytes;
}

TEST(MemoryPlanTest, HoldsTheRootAndTwoUnitsAndTwoReduceBuffers) {
  const MemoryPlan plan = PlanMemory(Layers(6), BytesOf(6), {});
  EXPECT_EQ(plan.shards, 6 * 250 + 25);
  EXPECT_EQ(plan.gradients, 6 * 250 + 25);
  EXPECT_EQ(plan.optimizer, 2 * (6 * 250 + 25));
  EXPECT_EQ(plan.gathered, 100 + 2 * 1000);
  EXPECT_EQ(plan.in_flight, 2 * 1008);
  EXPECT_EQ(plan.parts, 0);
  EXPECT_EQ(plan.total(), plan.shards + plan.gradients + plan.optimizer +
                              plan.gathered + plan.in_flight);
}

TEST(MemoryPlanTest, SteppingInBackwardNeedsTheGradientsOfOneUnit) {
  ScheduleOptions options;
  options.step_in_backward = true;
  EXPECT_EQ(PlanMemory(Layers(5), BytesOf(5), options).gradients, 250);
}

// Units of different sizes and strategies, nested at random.
class RandomUnits {
 public:
  explicit RandomUnits(uint32_t seed) : choices_(seed) {
    for (int i = choices_.Between(1, 9); i > 0; --i) Add();
    options_.forward_prefetch = choices_.Chance(70);
    options_.backward_prefetch = choices_.Chance(70);
    options_.max_gathered_units = choices_.Between(0, 3);
    options_.max_reduce_buffers = choices_.Between(1, 3);
  }

  const std::vector<ScheduledUnit>& units() const { return units_; }
  const std::vector<UnitBytes>& bytes() const { return bytes_; }
  const ScheduleOptions& options() const { return options_; }

  Events Step(bool synchronizes) const {
    Events events;
    Forward(0, events);
    Backward(0, events);
    events.push_back(EndOfBackward());
    for (Event& event : events) event.synchronizes = synchronizes;
    return events;
  }

 private:
  void Add() {
    const int index = static_cast<int>(units_.size());
    ScheduledUnit unit{absl::StrCat("unit", index),
                       index == 0 ? -1 : choices_.Between(0, index - 1)};
    unit.reshard_after_forward = index > 0 && choices_.Chance(60);
    unit.keep_until_sync = !unit.reshard_after_forward && choices_.Chance(50);
    unit.keeps_part = unit.reshard_after_forward && choices_.Chance(40);
    unit.replicated = choices_.Chance(30);
    unit.sharded = !unit.replicated || choices_.Chance(60);
    units_.push_back(unit);
    UnitBytes& bytes = bytes_.emplace_back();
    const int64_t whole = int64_t{100} * choices_.Between(1, 50);
    bytes.unsharded = {whole};
    bytes.shard = bytes.gradient = bytes.part = whole / 4;
    bytes.reduce_buffers = {whole + 16};
    bytes.trainable = choices_.Chance(80);
  }

  void Forward(int unit, Events& events) const {
    events.push_back(PreForward(unit));
    for (size_t i = 0; i < units_.size(); ++i) {
      if (units_[i].parent == unit) Forward(static_cast<int>(i), events);
    }
    events.push_back(PostForward(unit));
  }

  void Backward(int unit, Events& events) const {
    events.push_back(PreBackward(unit));
    for (int i = static_cast<int>(units_.size()) - 1; i > 0; --i) {
      if (units_[i].parent == unit) Backward(i, events);
    }
    events.push_back(bytes_[unit].trainable ? PostBackward(unit)
                                            : PostBackwardFrozen(unit));
  }

  SeededChoices choices_;
  std::vector<ScheduledUnit> units_;
  std::vector<UnitBytes> bytes_;
  ScheduleOptions options_;
};

// Counts the memory of actions in pools like those of the runtime.
class Memory {
 public:
  explicit Memory(const std::vector<UnitBytes>& bytes)
      : bytes_(bytes), gathered_of_(bytes.size()), whole_(bytes.size()) {}

  void Apply(const Action& action) {
    const UnitBytes& bytes = bytes_[action.unit];
    at::Tensor& gathered = gathered_of_[action.unit];
    at::Tensor& whole = whole_[action.unit];
    switch (action.kind) {
      case ActionKind::kGather:
        gathered = *gathered_.Acquire(bytes.unsharded.front());
        break;
      case ActionKind::kShrink:
        parts_ += bytes.part;
        gathered_.Release(gathered);
        break;
      case ActionKind::kFree:
        gathered_.Release(gathered);
        break;
      case ActionKind::kDropPart:
        parts_ -= bytes.part;
        break;
      case ActionKind::kAccumulate:
        if (!whole.defined())
          whole = *buffers_.Acquire(bytes.reduce_buffers.front());
        break;
      case ActionKind::kFillReduceBuffer:
        if (!whole.defined())
          whole = *buffers_.Acquire(bytes.reduce_buffers.front());
        reductions_.push_back(std::exchange(whole, at::Tensor()));
        break;
      case ActionKind::kWaitReduce:
        buffers_.Release(reductions_.front());
        reductions_.pop_front();
        break;
      default:
        break;
    }
    most_parts_ = std::max(most_parts_, parts_);
  }

  bool IsEmpty() const {
    return gathered_.stats().in_use_bytes + parts_ +
               buffers_.stats().in_use_bytes ==
           0;
  }
  int64_t most_gathered() const { return gathered_.stats().peak_in_use_bytes; }
  int64_t most_parts() const { return most_parts_; }
  int64_t most_buffers() const { return buffers_.stats().peak_in_use_bytes; }

 private:
  static absl::StatusOr<at::Tensor> Allocate(int64_t bytes) {
    return at::empty({bytes}, at::kByte);
  }

  const std::vector<UnitBytes>& bytes_;
  std::vector<at::Tensor> gathered_of_;
  std::vector<at::Tensor> whole_;
  std::deque<at::Tensor> reductions_;
  BufferPool gathered_{Allocate};
  BufferPool buffers_{Allocate};
  int64_t parts_ = 0;
  int64_t most_parts_ = 0;
};

TEST(MemoryPlanTest, OfRandomModelsIsWhatTheirStepsNeed) {
  constexpr int kSteps = 8;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomUnits model(seed);
    MemoryPlanOptions options;
    options.backwards_per_step = 1 + static_cast<int>(seed % 3);
    const MemoryPlan plan =
        PlanMemory(model.units(), model.bytes(), model.options(), options);
    Schedule schedule(model.units(), model.options());
    Memory memory(model.bytes());
    for (int i = 1; i <= kSteps * options.backwards_per_step; ++i) {
      const bool synchronizes = i % options.backwards_per_step == 0;
      for (const Event& event : model.Step(synchronizes)) {
        ASSERT_OK_AND_ASSIGN(const Actions actions, schedule.Next(event));
        for (const Action& action : actions) memory.Apply(action);
      }
      ASSERT_TRUE(memory.IsEmpty() || !synchronizes);
    }
    int64_t gradients = 0;
    for (const UnitBytes& unit : model.bytes()) {
      if (unit.trainable) gradients += unit.gradient;
    }
    EXPECT_EQ(plan.gradients, gradients);
    EXPECT_EQ(plan.optimizer, 2 * gradients);
    EXPECT_EQ(memory.most_gathered(), plan.gathered);
    EXPECT_EQ(memory.most_parts(), plan.parts);
    EXPECT_EQ(memory.most_buffers(), plan.in_flight);
  }
}

TEST(MemoryPlanTest, PrintsALineForEachKind) {
  const std::string text = PlanMemory(Layers(1), BytesOf(1), {}).ToString();
  for (const char* kind : {"shards", "gradients", "optimizer", "gathered",
                           "reduce buffers", "total"}) {
    EXPECT_THAT(text, ::testing::HasSubstr(kind));
  }
}

}  // namespace
}  // namespace fsdp::testing
