#include "fsdp/optim/fused_optimizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/status_error.h"
#include "base/testing/status_matchers.h"
#include "fsdp/optim/fused_runs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

const std::vector<int64_t>& Sizes() {
  static const auto* const sizes = new std::vector<int64_t>{
      0, 1, 2, 3, 5, 7, 0, 16, 64, 1, 1, 1, 13, 1009, 100, 31, 0};
  return *sizes;
}

at::Tensor Random(int64_t numel, int seed, at::ScalarType dtype = at::kFloat) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({numel}, generator, at::kFloat).to(dtype);
}

// Leaves that are slices of one tensor, as shards are, with gradients that are
// slices of another.
class Shards {
 public:
  explicit Shards(std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat)
      : sizes_(std::move(sizes)) {
    int64_t numel = 0;
    for (int64_t size : sizes_) numel += size;
    values = Random(numel, 1, dtype);
    Cut();
  }

  // The same values, every leaf with memory of its own.
  Shards Apart() const { return Apart(values.scalar_type()); }
  Shards Apart(at::ScalarType dtype) const {
    Shards apart = *this;
    apart.leaves.clear();
    for (const at::Tensor& leaf : leaves) {
      apart.leaves.push_back(leaf.detach().clone().to(dtype).requires_grad_());
    }
    apart.apart_ = true;
    return apart;
  }

  // Gradients of step `step` for the leaves that `has` wants.
  void SetGradients(int step, const std::function<bool(size_t)>& has = nullptr,
                    at::ScalarType dtype = at::kFloat) {
    const at::Tensor all = Random(values.numel(), 100 + step, dtype);
    int64_t begin = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      at::Tensor gradient = all.narrow(0, begin, sizes_[i]);
      begin += sizes_[i];
      if (apart_) gradient = gradient.clone();
      leaves[i].mutable_grad() =
          has == nullptr || has(i) ? gradient.detach() : at::Tensor();
    }
  }

  at::Tensor All() const { return at::cat(leaves).detach(); }

  at::Tensor values;
  std::vector<at::Tensor> leaves;

 private:
  void Cut() {
    int64_t begin = 0;
    for (int64_t size : sizes_) {
      leaves.push_back(values.narrow(0, begin, size).detach().requires_grad_());
      begin += size;
    }
  }

  std::vector<int64_t> sizes_;
  bool apart_ = false;
};

// An optimizer with and without fused kernels.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<OptimizerOptions>()> options;
  std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)>
      make_plain, make_fused;
};

std::unique_ptr<Optimizer> Of(const std::function<std::unique_ptr<Optimizer>(
                                  std::vector<OptimizerParamGroup>)>& make,
                              const std::vector<at::Tensor>& leaves) {
  return make({OptimizerParamGroup(leaves)});
}

template <typename Fused, typename Plain, typename Options>
Kind KindOf(std::string name, const Options& options) {
  Kind kind;
  kind.name = std::move(name);
  kind.options = [options] { return std::make_unique<Options>(options); };
  kind.make_plain = [options](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<Plain>(std::move(groups), options);
  };
  kind.make_fused = [options](std::vector<OptimizerParamGroup> groups) {
    return std::make_unique<Fused>(std::move(groups), options);
  };
  return kind;
}

Kind AdamWKind(std::string name, const AdamWOptions& options) {
  return KindOf<FusedAdamW, torch::optim::AdamW>(std::move(name), options);
}
Kind AdamKind(std::string name, const AdamOptions& options) {
  return KindOf<FusedAdam, torch::optim::Adam>(std::move(name), options);
}
Kind SgdKind(std::string name, const SGDOptions& options) {
  return KindOf<FusedSGD, torch::optim::SGD>(std::move(name), options);
}

std::vector<Kind> Kinds() {
  return {
      AdamWKind("AdamW", AdamWOptions(1e-2)),
      AdamWKind("AdamWAmsgrad",
                AdamWOptions(1e-2).amsgrad(true).weight_decay(0).eps(1e-6)),
      AdamKind("Adam", AdamOptions(1e-2)),
      AdamKind("AdamDecayAmsgrad",
               AdamOptions(1e-2).weight_decay(0.1).amsgrad(true)),
      SgdKind("SGD", SGDOptions(0.1)),
      SgdKind("SGDMomentum",
              SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.01)),
      SgdKind("SGDNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
  };
}

// On one thread: tensors are so small that several would only wait for each
// other.
class FusedOptimizerTest : public ::testing::TestWithParam<Kind> {
 protected:
  FusedOptimizerTest() { at::set_num_threads(1); }
};

INSTANTIATE_TEST_SUITE_P(Kinds, FusedOptimizerTest,
                         ::testing::ValuesIn(Kinds()),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

// Each in turn lacks a gradient, some for the first steps.
std::function<bool(size_t)> SomeAt(int step) {
  return [step](size_t i) { return i % 5 != 0 || (step > 3 && step % 2 == 0); };
}

// Thirds of the leaves, with learning rates of their own and, in the last, what
// else is changed by `adapt`.
std::vector<OptimizerParamGroup> Thirds(const std::vector<at::Tensor>& leaves,
                                        const Kind& kind) {
  std::vector<OptimizerParamGroup> groups;
  const size_t third = leaves.size() / 3;
  for (size_t g = 0; g < 3; ++g) {
    const auto begin = leaves.begin() + g * third;
    const auto end = g == 2 ? leaves.end() : begin + third;
    std::unique_ptr<OptimizerOptions> options = kind.options();
    options->set_lr(options->get_lr() * (1 + g));
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

// A tensor of 1000 elements over `ranks`, whose parts end anywhere.
at::Tensor TrainedOver(int64_t ranks, const Kind& kind) {
  std::vector<int64_t> sizes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sizes.push_back((rank + 1) * 1000 / ranks - rank * 1000 / ranks);
  }
  const Shards shards = Shards(std::move(sizes)).Apart();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
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

// Against the same in double.
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
        // Not near to zero: its square would be zero in half.
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
  // More than one piece of conversion.
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

std::string Saved(const Optimizer& optimizer) {
  std::ostringstream out;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(out);
  return out.str();
}

void Load(const std::string& bytes, Optimizer& optimizer) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  optimizer.load(archive);
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
  // In the middle of another training, whose states are replaced.
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
  for (int step = 5; step < 10; ++step) {
    expected.SetGradients(step, SomeAt(step));
    shards.SetGradients(step, SomeAt(step));
    resumed->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
  // And on, by torch's.
  Load(Saved(*fused), *resumed);
  for (int step = 10; step < 15; ++step) {
    expected.SetGradients(step, SomeAt(step));
    shards.SetGradients(step, SomeAt(step));
    resumed->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
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

// Bytes that this thread allocates for tensors while it lives.
class AllocationCounter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t alloc_size,
                         size_t /*total_allocated*/, size_t /*total_reserved*/,
                         c10::Device /*device*/) override {
    if (alloc_size > 0) bytes += alloc_size;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t bytes = 0;
};

int64_t BytesAllocatedBy(const std::function<void()>& fn) {
  const auto counter = std::make_shared<AllocationCounter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
  fn();
  return counter->bytes;
}

TEST_P(FusedOptimizerTest, AllocatesItsStatesOnceAndNothingAfterwards) {
  Shards shards(Sizes());
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  shards.SetGradients(0);
  const int64_t first = BytesAllocatedBy([&] { optimizer->step(); });
  // At most three tensors like the parameters, the ends of runs and a number.
  EXPECT_LE(first, 3 * 4 * shards.values.numel() + 5 * 64 + 64 + 3 * 64);
  for (int step = 1; step < 4; ++step) {
    shards.SetGradients(step);
    EXPECT_EQ(BytesAllocatedBy([&] { optimizer->step(); }), 0) << step;
  }
}

// Numbers of tensors in the calls of fused kernels.
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
  // Whole vectors, and the elements that are left.
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::ElementsAre(2));
  shards.SetGradients(1, [](size_t i) { return i != 3; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::ElementsAre(3));
  shards.SetGradients(2, [](size_t) { return false; });
  EXPECT_THAT(CallsBy([&] { optimizer->step(); }), ::testing::IsEmpty());
}

TEST_P(FusedOptimizerTest, LeavesWhatHasNoGradientWithoutState) {
  Shards shards({5, 70, 3});
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  shards.SetGradients(0, [](size_t i) { return i == 1; });
  optimizer->step();
  const Shards before({5, 70, 3});
  EXPECT_TRUE(shards.leaves[0].equal(before.leaves[0]));
  EXPECT_FALSE(shards.leaves[1].equal(before.leaves[1]));
  EXPECT_TRUE(shards.leaves[2].equal(before.leaves[2]));
  EXPECT_EQ(optimizer->state().count(shards.leaves[0].unsafeGetTensorImpl()),
            0u);
}

TEST(FusedAdamWTest, StepsParametersThatLieOtherwiseThanTheirGradients) {
  const auto make = [] {
    return Random(12 * 7, 3).view({12, 7}).t().requires_grad_();
  };
  const at::Tensor expected = make();
  const at::Tensor parameter = make();
  torch::optim::AdamW plain({expected});
  FusedAdamW fused(std::vector<at::Tensor>{parameter});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor gradient = Random(12 * 7, step).view({7, 12});
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

// From a file, too, whose tensors have memory of their own.
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
    const at::Tensor sum = parameter.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_LT(parameter.sum().item<float>(), 3);
}

absl::Status StatusOfStep(Optimizer& optimizer) {
  try {
    optimizer.step();
  } catch (const StatusError& error) {
    return error.status();
  }
  return absl::OkStatus();
}

TEST(FusedAdamWTest, RefusesWhatTheKernelsCannotStepWithNothingChanged) {
  Shards shards({3, 20});
  FusedAdamW optimizer(shards.leaves);
  shards.SetGradients(0);
  const at::Tensor before = shards.All();
  shards.leaves[1].mutable_grad() = shards.leaves[1].grad().to_sparse();
  EXPECT_THAT(StatusOfStep(optimizer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("parameter 1 of group 0: its gradient is "
                                 "sparse")));
  shards.leaves[1].mutable_grad() = at::ones({19});
  EXPECT_THAT(StatusOfStep(optimizer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("sizes [19], dtype Float, on cpu, and it has "
                                 "sizes [20]")));
  EXPECT_TRUE(shards.All().equal(before));
  EXPECT_TRUE(optimizer.state().empty());

  FusedAdamW of_gaps(std::vector<at::Tensor>{
      at::ones({4, 4}).narrow(1, 0, 2).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_gaps),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("parameter 0 of group 0: it is sparse, or its "
                                 "elements have gaps")));
  FusedAdamW of_complex(std::vector<at::Tensor>{
      at::ones({4}, at::kComplexFloat).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_complex),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("dtype ComplexFloat")));
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

// Whether the first step runs out of memory at its allocation `index`, after
// which the next ones have to be exact.
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
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("its state has sizes [7], and it has [8]")));
}

}  // namespace
}  // namespace fsdp
