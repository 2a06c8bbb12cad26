#include "fsdp/optim/fused_optimizer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/schedulers/step_lr.h>

#include <new>
#include <set>

#include "fsdp/optim/fused_runs.h"
#include "fsdp/testing/fused_optimizer_cases.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

INSTANTIATE_TEST_SUITE_P(Kinds, FusedOptimizerTest,
                         ::testing::ValuesIn(Kinds()),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

// Returns thirds of the leaves with learning rates of their own; `adapt`
// changes the options of the last one.
std::vector<OptimizerParamGroup> Thirds(const std::vector<at::Tensor>& leaves,
                                        const Kind& kind) {
  std::vector<OptimizerParamGroup> groups;
  const auto third = static_cast<int64_t>(leaves.size() / 3);
  for (int64_t g = 0; g < 3; ++g) {
    const auto begin = leaves.begin() + g * third;
    const auto end = g == 2 ? leaves.end() : begin + third;
    std::unique_ptr<OptimizerOptions> options = kind.options();
    options->set_lr(options->get_lr() * static_cast<double>(1 + g));
    if (auto* adamw = dynamic_cast<AdamWOptions*>(options.get()); g == 2) {
      if (adamw != nullptr) adamw->betas({0.8, 0.9}).weight_decay(0.2);
    }
    groups.emplace_back(std::vector<at::Tensor>(begin, end),
                        std::move(options));
  }
  return groups;
}

TEST_P(FusedOptimizerTest, IsTorchsOverGroupsSchedulesAndMissingGradients) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  for (Shards* each : {&expected, &shards}) {
    each->leaves[8].set_requires_grad(false);
  }
  const auto plain = GetParam().make_plain(Thirds(expected.leaves, GetParam()));
  const auto fused = GetParam().make_fused(Thirds(shards.leaves, GetParam()));
  torch::optim::StepLR plain_rates(*plain, 4, 0.5);
  torch::optim::StepLR fused_rates(*fused, 4, 0.5);
  for (int step = 0; step < 20; ++step) {
    const auto has = [&](size_t i) { return i != 8 && SomeAt(step)(i); };
    expected.SetGradients(step, has);
    shards.SetGradients(step, has);
    plain->step();
    fused->step();
    plain_rates.step();
    fused_rates.step();
    EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6)) << step;
  }
  EXPECT_TRUE(shards.leaves[8].equal(Shards(Sizes()).leaves[8]));
  EXPECT_FALSE(shards.leaves[7].equal(Shards(Sizes()).leaves[7]));
}

at::Tensor TrainedFor(int steps, Shards shards, Optimizer& optimizer) {
  for (int step = 0; step < steps; ++step) {
    shards.SetGradients(step, SomeAt(step));
    optimizer.step();
  }
  return shards.All();
}

TEST_P(FusedOptimizerTest, StepsMergedSlicesToTheSameBitsAsSlicesApart) {
  const Shards merged(Sizes());
  const Shards apart = merged.Apart();
  const auto of_merged = Of(GetParam().make_fused, merged.leaves);
  const auto of_apart = Of(GetParam().make_fused, apart.leaves);
  EXPECT_TRUE(TrainedFor(12, merged, *of_merged)
                  .equal(TrainedFor(12, apart, *of_apart)));
}

// Trains a tensor of 1000 elements over `ranks`, whose parts end anywhere.
at::Tensor TrainedOver(int64_t ranks, const Kind& kind) {
  std::vector<int64_t> sizes;
  sizes.reserve(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sizes.push_back((rank + 1) * 1000 / ranks - rank * 1000 / ranks);
  }
  const Shards shards = Shards(std::move(sizes)).Apart();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  optimizers.reserve(shards.leaves.size());
  for (const at::Tensor& leaf : shards.leaves) {
    optimizers.push_back(Of(kind.make_fused, {leaf}));
  }
  Shards gradients = shards;
  for (int step = 0; step < 5; ++step) {
    gradients.SetGradients(step);
    for (const auto& optimizer : optimizers) optimizer->step();
  }
  return shards.All();
}

TEST_P(FusedOptimizerTest, GivesTheSameBitsForAnyNumberOfRanksAndThreads) {
  const at::Tensor whole = TrainedOver(1, GetParam());
  for (int64_t ranks : {2, 3, 5, 7, 1000}) {
    EXPECT_TRUE(TrainedOver(ranks, GetParam()).equal(whole)) << ranks;
  }
  at::set_num_threads(3);
  EXPECT_TRUE(TrainedOver(3, GetParam()).equal(whole));
  at::set_num_threads(1);
}

// Compares with the same steps in double.
TEST_P(FusedOptimizerTest, StepsOtherDtypes) {
  for (at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    Shards shards(Sizes(), dtype);
    Shards expected = shards.Apart(at::kDouble);
    const auto plain = Of(GetParam().make_plain, expected.leaves);
    const auto fused = Of(GetParam().make_fused, shards.leaves);
    const double tolerance = dtype == at::kDouble ? 1e-12 : 0.03;
    for (int step = 0; step < 3; ++step) {
      shards.SetGradients(step, nullptr, dtype);
      for (size_t i = 0; i < shards.leaves.size(); ++i) {
        // Gradients must not be near zero: their squares would be zero in half.
        at::Tensor gradient = shards.leaves[i].grad();
        gradient.add_(gradient.sign());
        expected.leaves[i].mutable_grad() = gradient.to(at::kDouble);
      }
      plain->step();
      fused->step();
    }
    EXPECT_TRUE(at::allclose(shards.All().to(at::kDouble), expected.All(),
                             tolerance, tolerance))
        << dtype;
    EXPECT_FALSE(shards.All().equal(Shards(Sizes(), dtype).All()));
  }
}

TEST_P(FusedOptimizerTest, ConvertsGradientsOfAnotherDtype) {
  // These need more than one piece of conversion.
  const std::vector<int64_t> sizes = {5, FusedRuns::kConvertedNumel, 3, 1001};
  Shards expected(sizes);
  Shards shards(sizes);
  const auto converted = Of(GetParam().make_fused, expected.leaves);
  const auto fused = Of(GetParam().make_fused, shards.leaves);
  for (int step = 0; step < 2; ++step) {
    shards.SetGradients(step, nullptr, at::kBFloat16);
    for (size_t i = 0; i < sizes.size(); ++i) {
      expected.leaves[i].mutable_grad() =
          shards.leaves[i].grad().to(at::kFloat);
    }
    converted->step();
    fused->step();
  }
  EXPECT_TRUE(shards.All().equal(expected.All()));
}

TEST(FusedStepUnitTest, StepsNoOtherUnitInTheSameMemory) {
  Shards shards({3, 5, 2});
  FusedAdamW optimizer(shards.leaves, AdamWOptions(0.1));
  shards.SetGradients(0);
  const at::Tensor before = shards.values.clone();
  TensorRange unit;
  unit.values = shards.leaves[1];
  ASSERT_OK(optimizer.StepUnit({unit}));
  EXPECT_FALSE(shards.leaves[1].grad().defined());
  EXPECT_TRUE(shards.leaves[2].grad().defined());
  const at::Tensor same = shards.values.eq(before);
  EXPECT_EQ(same.sum().item<int64_t>(), 5);
  EXPECT_FALSE(same.slice(0, 3, 8).any().item<bool>());
}

TEST_P(FusedOptimizerTest, ResumesToTheSameBitsFromItsFile) {
  Shards shards(Sizes());
  Shards resumed(Sizes());
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  TrainedFor(4, shards, *optimizer);
  {
    c10::NoGradGuard no_grad;
    resumed.values.copy_(shards.values);
  }
  const auto loaded = Of(GetParam().make_fused, resumed.leaves);
  Load(Saved(*optimizer), *loaded);
  for (int step = 4; step < 8; ++step) {
    shards.SetGradients(step, SomeAt(step));
    resumed.SetGradients(step, SomeAt(step));
    optimizer->step();
    loaded->step();
  }
  EXPECT_TRUE(resumed.All().equal(shards.All()));
}

TEST_P(FusedOptimizerTest, ReadsFilesOfTorchsAndTheOtherWayRound) {
  const Shards one(Sizes());
  Shards expected(Sizes());
  Shards shards(Sizes());
  const auto plain = Of(GetParam().make_plain, expected.leaves);
  TrainedFor(5, expected, *plain);
  {
    c10::NoGradGuard no_grad;
    shards.values.copy_(expected.values);
  }
  // Loads in the middle of another training and replaces its states.
  const auto fused = Of(GetParam().make_fused, shards.leaves);
  const auto resumed = Of(GetParam().make_plain, expected.leaves);
  {
    Shards before(Sizes());
    const auto earlier = Of(GetParam().make_plain, before.leaves);
    TrainedFor(2, before, *earlier);
    Load(Saved(*earlier), *fused);
  }
  Load(Saved(*plain), *fused);
  Load(Saved(*fused), *resumed);
  for (int step = 5; step < 15; ++step) {
    // Torch's optimizer goes on from there.
    if (step == 10) Load(Saved(*fused), *resumed);
    expected.SetGradients(step, SomeAt(step));
    shards.SetGradients(step, SomeAt(step));
    resumed->step();
    fused->step();
    EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6)) << step;
  }
}

TEST_P(FusedOptimizerTest, GoesUpTheGradientWithMaximize) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  const auto plain = Of(GetParam().make_plain, expected.leaves);
  FusedOptions up;
  up.maximize = true;
  std::unique_ptr<Optimizer> fused;
  const std::unique_ptr<OptimizerOptions> options = GetParam().options();
  if (const auto* adamw = dynamic_cast<AdamWOptions*>(options.get())) {
    fused = std::make_unique<FusedAdamW>(shards.leaves, *adamw, up);
  } else if (const auto* adam = dynamic_cast<AdamOptions*>(options.get())) {
    fused = std::make_unique<FusedAdam>(shards.leaves, *adam, up);
  } else {
    fused = std::make_unique<FusedSGD>(
        shards.leaves, dynamic_cast<const SGDOptions&>(*options), up);
  }
  for (int step = 0; step < 5; ++step) {
    expected.SetGradients(step);
    shards.SetGradients(step);
    for (const at::Tensor& leaf : expected.leaves) leaf.grad().neg_();
    plain->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
}

auto Refuses(const char* text) {
  return StatusIs(Code::kInvalidArgument, HasSubstr(text));
}

TEST(FusedOptimizerOptionsTest, WhatLibTorchRefusesIsAnInvalidArgument) {
  const std::vector<at::Tensor> none;
  const auto adamw = [&](const AdamWOptions& options) {
    return TorchToStatus("", [&] { FusedAdamW(none, options); });
  };
  EXPECT_OK(adamw(AdamWOptions(0)));
  EXPECT_THAT(adamw(AdamWOptions(-1)), Refuses("learning rate: -1"));
  EXPECT_THAT(adamw(AdamWOptions().eps(-1)), Refuses("epsilon value: -1"));
  EXPECT_THAT(adamw(AdamWOptions().betas({0.9, 1})), Refuses("index 1: 1"));
  EXPECT_THAT(adamw(AdamWOptions().weight_decay(-2)),
              Refuses("weight_decay value: -2"));
  EXPECT_THAT(TorchToStatus("", [&] { FusedAdam(none, AdamOptions(-1)); }),
              Refuses("learning rate: -1"));
  EXPECT_THAT(TorchToStatus("", [&] { FusedSGD(none, SGDOptions(-1)); }),
              Refuses("learning rate: -1"));
}

TEST(FusedAdamWTest, StepsParametersThatLieOtherwiseThanTheirGradients) {
  const auto make = [] {
    return Random(84, 3).view({12, 7}).t().requires_grad_();
  };
  const at::Tensor expected = make();
  const at::Tensor parameter = make();
  torch::optim::AdamW plain({expected});
  FusedAdamW fused(std::vector<at::Tensor>{parameter});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor gradient = Random(84, step).view({7, 12});
    expected.mutable_grad() = gradient;
    parameter.mutable_grad() = gradient;
    plain.step();
    fused.step();
  }
  EXPECT_TRUE(at::allclose(parameter, expected, 1e-5, 1e-6));
}

TEST(FusedAdamWTest, FollowsGroupsAndOptionsThatChange) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  const std::vector<at::Tensor> some(expected.leaves.begin(),
                                     expected.leaves.begin() + 9);
  torch::optim::AdamW plain(some);
  FusedAdamW fused(std::vector<at::Tensor>(shards.leaves.begin(),
                                           shards.leaves.begin() + 9));
  for (int step = 0; step < 9; ++step) {
    expected.SetGradients(step);
    shards.SetGradients(step);
    if (step == 3) {
      plain.add_param_group(OptimizerParamGroup(std::vector<at::Tensor>(
          expected.leaves.begin() + 9, expected.leaves.end())));
      fused.add_param_group(OptimizerParamGroup(std::vector<at::Tensor>(
          shards.leaves.begin() + 9, shards.leaves.end())));
    }
    for (Optimizer* each : std::vector<Optimizer*>{&plain, &fused}) {
      auto& options =
          static_cast<AdamWOptions&>(each->param_groups().back().options());
      options.lr(1e-3 * (step + 1)).weight_decay(step % 2);
    }
    plain.step();
    fused.step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
}

// States also come from a file, whose tensors have memory of their own.
TEST(FusedAdamWTest, KeepsStatesAsTheParametersLie) {
  Shards shards(Sizes());
  FusedAdamW optimizer(shards.leaves);
  for (int step = 0; step < 2; ++step) {
    shards.SetGradients(step);
    optimizer.step();
    int64_t begin = 0;
    std::set<const void*> storages;
    for (const at::Tensor& leaf : shards.leaves) {
      auto& state = static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(leaf.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), step + 1);
      EXPECT_EQ(state.exp_avg().storage_offset(), begin);
      storages.insert(state.exp_avg().storage().unsafeGetStorageImpl());
      begin += leaf.numel();
    }
    EXPECT_EQ(storages.size(), 1u);
    Load(Saved(optimizer), optimizer);
  }
}

TEST(FusedAdamWTest, WritesEachStateOnce) {
  Shards shards(std::vector<int64_t>(50, 1000));
  FusedAdamW optimizer(shards.leaves);
  shards.SetGradients(0);
  optimizer.step();
  EXPECT_LT(Saved(optimizer).size(), 2 * 4 * 50000 * 1.5);
}

TEST(FusedAdamWTest, ReturnsTheLossOfItsClosure) {
  const at::Tensor parameter = at::ones({3}).requires_grad_();
  FusedAdamW optimizer(std::vector<at::Tensor>{parameter});
  c10::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    at::Tensor sum = parameter.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_LT(parameter.sum().item<float>(), 3);
}

absl::Status StatusOfStep(Optimizer& optimizer) {
  return TorchToStatus("step", [&] { optimizer.step(); });
}

TEST(FusedAdamWTest, RefusesWhatTheKernelsCannotStepWithNothingChanged) {
  Shards shards({3, 20});
  FusedAdamW optimizer(shards.leaves);
  shards.SetGradients(0);
  const at::Tensor before = shards.All();
  shards.leaves[1].mutable_grad() = shards.leaves[1].grad().to_sparse();
  EXPECT_THAT(StatusOfStep(optimizer),
              Refuses("parameter 1 of group 0: its gradient is "
                      "sparse"));
  shards.leaves[1].mutable_grad() = at::ones({19});
  EXPECT_THAT(StatusOfStep(optimizer),
              Refuses("sizes [19], dtype Float, on cpu, and it has "
                      "sizes [20]"));
  EXPECT_TRUE(shards.All().equal(before));
  EXPECT_TRUE(optimizer.state().empty());

  FusedAdamW of_gaps(std::vector<at::Tensor>{
      at::ones({4, 4}).narrow(1, 0, 2).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_gaps),
              Refuses("parameter 0 of group 0: it is sparse, or its "
                      "elements have gaps"));
  FusedAdamW of_complex(std::vector<at::Tensor>{
      at::ones({4}, at::kComplexFloat).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_complex), Refuses("dtype ComplexFloat"));
}

TEST(FusedAdamWTest, RefusesAStateOfAnotherShape) {
  Shards other({7});
  torch::optim::AdamW written(other.leaves);
  other.SetGradients(0);
  written.step();
  Shards shards({8});
  FusedAdamW optimizer(shards.leaves);
  Load(Saved(written), optimizer);
  shards.SetGradients(0);
  EXPECT_THAT(StatusOfStep(optimizer),
              Refuses("its state has sizes [7], and it has [8]"));
}

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
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ElementsAre(2));
  shards.SetGradients(1, [](size_t i) { return i != 3; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ElementsAre(3));
  shards.SetGradients(2, [](size_t) { return false; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), IsEmpty());
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
}  // namespace fsdp::testing
