#include "fsdp/deferred/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "base/testing/random_operators.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::torch::indexing::None;
using ::torch::indexing::Slice;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kDim = 6;

DeferredInitOptions Everything() { return {/*min_bytes=*/0}; }

template <typename Make>
auto Deferred(const Make& make) {
  const DeferredInit deferred(Everything());
  return make();
}

// --- Values without random numbers -------------------------------------------

struct Program {
  const char* name;
  std::function<Tensors()> run;
};

const Program kPrograms[] = {
    {"Factories",
     [] {
       return Tensors{torch::zeros({2, 3}),
                      torch::ones({3}, torch::kDouble),
                      torch::full({2}, 1.5),
                      torch::arange(7),
                      torch::arange(1, 9, 2, torch::kFloat),
                      torch::linspace(0, 1, 5),
                      torch::eye(3),
                      torch::zeros({0, 4}),
                      torch::scalar_tensor(2.5)};
     }},
    {"PositionalEncoding",
     [] {
       at::Tensor table = torch::zeros({9, kDim});
       const at::Tensor position = torch::arange(9).unsqueeze(1);
       const at::Tensor rate =
           torch::exp(torch::arange(0, kDim, 2) * (-std::log(1e4) / kDim));
       table.index_put_({Slice(), Slice(0, None, 2)},
                        torch::sin(position * rate));
       table.index_put_({Slice(), Slice(1, None, 2)},
                        torch::cos(position * rate));
       return Tensors{table.unsqueeze(0).transpose(0, 1)};
     }},
    {"ValuesThatSteer",
     [] {
       at::Tensor a = torch::arange(5).to(torch::kFloat);
       if (a.sum().item<float>() > 9) a.add_(1);
       if (torch::equal(a, a.clone())) a.mul_(3);
       return Tensors{a, a.nonzero(), torch::tensor({1.0, 2.0}) + a[0]};
     }},
    {"DtypesAndLists",
     [] {
       at::Tensor a = torch::ones({3, 2});
       at::Tensor stacked = torch::stack({a, a * 2, a.to(torch::kFloat)});
       return Tensors{stacked, stacked.to(torch::kBFloat16),
                      torch::cat({a, a}, 1).to(torch::kDouble)};
     }},
    {"InPlace",
     [] {
       at::Tensor a = torch::empty({kDim, kDim});
       torch::nn::init::constant_(a, 0.25);
       at::Tensor b = torch::empty({kDim, kDim});
       torch::nn::init::eye_(b);
       at::Tensor c = torch::empty({2, 2, 3, 3});
       torch::nn::init::dirac_(c);
       return Tensors{a.add_(b, 2).mul_(3), b, c};
     }},
    {"WritesThroughViews",
     [] {
       at::Tensor a = torch::zeros({4, 6});
       a[1].fill_(1);
       a.narrow(1, 2, 2).add_(10);
       a.t().slice(0, 4, 6).copy_(torch::arange(8).view({2, 4}));
       a.view({-1}).index_put_({torch::tensor({0, 23})}, -1.0);
       at::Tensor column = a.select(1, 0);
       column.mul_(2);
       return Tensors{a, column, a.diagonal()};
     }},
    {"OldValuesReadLate",
     [] {
       at::Tensor a = torch::ones({5});
       at::Tensor before = a.clone();
       at::Tensor doubled = a * 2;
       a.fill_(7);
       at::Tensor after = a + before;
       a.copy_(doubled);
       return Tensors{before, after, a, doubled};
     }},
    {"MetadataInPlace",
     [] {
       at::Tensor a = torch::arange(6).view({2, 3}).to(torch::kFloat);
       a.t_().unsqueeze_(0);
       a.mul_(2);
       return Tensors{a, torch::ones({1, 3}).squeeze_(0)};
     }},
    {"SmallOnesWrittenByPointer",
     [] {
       const EagerInit eager;
       at::Tensor a = torch::empty({3});
       a.accessor<float, 1>()[2] = 4;
       a.data_ptr<float>()[0] = a.data_ptr<float>()[1] = 5;
       return Tensors{a};
     }},
    {"LazyConjugation",
     [] {
       const at::Tensor a = torch::view_as_complex(
           torch::arange(6).to(torch::kFloat).view({3, 2}));
       return Tensors{a.conj().clone(), torch::cat({a, a.conj()}),
                      torch::imag(a.conj()) + 1, a.conj()};
     }},
    {"Sparse",
     [] {
       const at::Tensor sparse = torch::sparse_coo_tensor(
           torch::arange(4).view({2, 2}), torch::ones({2}), {4, 4});
       return Tensors{sparse.to_dense(),
                      torch::mm(sparse, torch::ones({4, 3}))};
     }},
};

class ProgramTest : public ::testing::TestWithParam<Program> {};

TEST_P(ProgramTest, GivesWhatItGivesUndeferred) {
  const Tensors expected = GetParam().run();
  const Tensors actual = Deferred(GetParam().run);
  ASSERT_EQ(actual.size(), expected.size());
  // Values are taken in either order, and more than once.
  for (const bool reverse : {false, true}) {
    for (size_t i = 0; i < actual.size(); ++i) {
      const size_t at = reverse ? actual.size() - 1 - i : i;
      const at::Tensor value = ValueOf(actual[at]);
      EXPECT_EQ(value.strides(), expected[at].strides()) << at;
      EXPECT_EQ(value.scalar_type(), expected[at].scalar_type()) << at;
      EXPECT_TRUE(at::equal(value, expected[at])) << at << ": " << value;
    }
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    Materialize(actual[i]);
    EXPECT_FALSE(IsDeferred(actual[i]));
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ProgramTest, ::testing::ValuesIn(kPrograms),
                         [](const auto& info) { return info.param.name; });

// --- Random values -----------------------------------------------------------

// Returns what `draw` gives with the seed that a deferred operator draws.
at::Tensor Seeded(const at::Generator& generator,
                  const std::function<at::Tensor()>& draw) {
  const uint64_t seed =
      at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  torch::manual_seed(seed);
  return draw();
}

TEST(RandomTest, EveryOperatorHasASeedFromTheDefaultGenerator) {
  const std::vector<std::function<at::Tensor()>> draws = {
      [] { return torch::rand({7}); },
      [] {
        return torch::randn({2, 3});
      },
      [] { return torch::randint(10, {8}); },
      [] { return torch::randint(3, 10, {8}); },
      [] { return torch::empty({5}).uniform_(-1, 1); },
      [] { return torch::empty({5}).normal_(2, 3); },
      [] { return torch::empty({5}).bernoulli_(0.5); },
      [] { return torch::rand_like(torch::ones({4})); },
  };
  torch::manual_seed(7);
  Tensors actual;
  for (const auto& draw : draws) actual.push_back(Deferred(draw));
  const at::Generator generator = at::detail::createCPUGenerator(7);
  for (size_t i = 0; i < draws.size(); ++i) {
    const at::Tensor expected = Seeded(generator, draws[i]);
    const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
    EXPECT_TRUE(at::equal(ValueOf(actual[i]), expected)) << i;
    EXPECT_TRUE(
        at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  }
}

TEST(RandomTest, AGivenGeneratorGivesTheSeeds) {
  const auto draw = [](std::optional<at::Generator> generator) {
    return torch::empty({5}).uniform_(0, 1, std::move(generator));
  };
  const at::Generator mine = at::detail::createCPUGenerator(3);
  const at::Tensor first = Deferred([&] { return draw(mine); });
  const at::Tensor second = Deferred([&] { return draw(mine); });
  const at::Generator oracle = at::detail::createCPUGenerator(3);
  const auto plain = [&] { return draw(std::nullopt); };
  const at::Tensor expected = Seeded(oracle, plain);
  // Values are taken in the other order.
  EXPECT_TRUE(at::equal(ValueOf(second), Seeded(oracle, plain)));
  EXPECT_TRUE(at::equal(ValueOf(first), expected));
  EXPECT_FALSE(at::equal(ValueOf(first), ValueOf(second)));
}

TEST(RandomTest, WhatIsOverwrittenIsNotReplayed) {
  torch::manual_seed(7);
  // The constructor draws twice.
  Linear linear = Deferred([] { return Linear(kDim, 3); });
  at::Tensor copy;
  {
    const DeferredInit deferred(Everything());
    const c10::NoGradGuard no_grad;
    copy = linear->weight.detach().clone();
    linear->weight.fill_(3);
    linear->weight.normal_(1, 2);
    linear->weight[0].zero_();
    linear->bias.zero_();
  }
  const at::Generator generator = at::detail::createCPUGenerator(7);
  const at::Tensor first = Seeded(generator, [] {
    const double bound = 1 / std::sqrt(kDim);
    return torch::empty({3, kDim}).uniform_(-bound, bound);
  });
  Seeded(generator, [] { return at::Tensor(); });  // the bias draws, too
  at::Tensor second = Seeded(generator, [] {
    return torch::empty({3, kDim}).normal_(1, 2);
  });
  second[0].zero_();
  {
    const testing::RandomOperators random;
    EXPECT_OK(Materialize(*linear));
    EXPECT_EQ(random.count(), 1);
  }
  EXPECT_TRUE(at::equal(linear->weight, second));
  EXPECT_TRUE(at::equal(linear->bias, at::zeros({3})));
  // An earlier reader has the values of that time.
  EXPECT_TRUE(at::allclose(ValueOf(copy), first));
}

// --- Modules -----------------------------------------------------------------

struct NamedModule {
  const char* name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
};

template <typename Holder>
std::shared_ptr<torch::nn::Module> PointerTo(const Holder& holder) {
  return holder.ptr();
}

const NamedModule kModules[] = {
    {"Linear", [] { return PointerTo(Linear(kDim, 3)); }},
    {"Conv", [] { return PointerTo(torch::nn::Conv2d(2, 4, 3)); }},
    {"Embedding",
     [] {
       return PointerTo(torch::nn::Embedding(
           torch::nn::EmbeddingOptions(5, kDim).padding_idx(1)));
     }},
    {"BatchNorm", [] { return PointerTo(torch::nn::BatchNorm1d(kDim)); }},
    {"Lstm",
     [] {
       return PointerTo(torch::nn::LSTM(
           torch::nn::LSTMOptions(kDim, 3).num_layers(2).bidirectional(true)));
     }},
    {"Transformer",
     [] {
       const torch::nn::TransformerEncoderLayerOptions layer(kDim, 2);
       return PointerTo(torch::nn::TransformerEncoder(
           torch::nn::TransformerEncoderLayer(layer), 2));
     }},
    {"InitFunctions",
     [] {
       auto linear = Linear(kDim, 8);
       torch::nn::init::orthogonal_(linear->weight);
       torch::nn::init::xavier_normal_(linear->weight.narrow(0, 0, 4));
       auto sparse = Linear(kDim, 8);
       torch::nn::init::sparse_(sparse->weight, 0.5);
       torch::nn::init::kaiming_normal_(sparse->bias.view({2, 4}));
       return PointerTo(torch::nn::Sequential(linear, sparse));
     }},
};

class ModuleTest : public ::testing::TestWithParam<NamedModule> {};

TEST_P(ModuleTest, GetsItsValuesFromTheSeedAlone) {
  const auto make = [](uint64_t seed) {
    torch::manual_seed(seed);
    return Deferred(GetParam().make);
  };
  const auto plain = GetParam().make();
  const auto a = make(5);
  const auto b = make(5);
  const auto other = make(6);
  const auto pa = a->named_parameters();
  // Values are taken from the last to the first.
  Tensors values;
  for (size_t i = pa.size(); i-- > 0;) {
    EXPECT_TRUE(IsDeferred(pa[i].value())) << pa[i].key();
    values.insert(values.begin(), ValueOf(pa[i].value()));
  }
  ASSERT_OK(Materialize(*b));
  ASSERT_OK(Materialize(*other));
  bool differs = false;
  const auto pb = b->named_parameters();
  const auto expected = plain->named_parameters();
  ASSERT_EQ(pb.size(), expected.size());
  for (size_t i = 0; i < pb.size(); ++i) {
    const at::Tensor& value = pb[i].value();
    EXPECT_EQ(pb[i].key(), expected[i].key());
    EXPECT_EQ(value.sizes(), expected[i].value().sizes());
    EXPECT_TRUE(value.requires_grad() && value.is_leaf());
    EXPECT_TRUE(at::equal(value, values[i])) << pb[i].key();
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << pb[i].key();
    differs |= !at::equal(value, other->parameters()[i]);
    // Constants come from the constructor.
    const at::Tensor& constant = expected[i].value();
    if (constant.numel() > 1 && constant.std().item<double>() == 0) {
      EXPECT_TRUE(at::equal(value, constant)) << pb[i].key();
    }
  }
  EXPECT_EQ(differs, GetParam().name != std::string("BatchNorm"));
  for (const auto& item : plain->named_buffers()) {
    EXPECT_TRUE(at::equal(b->named_buffers()[item.key()], item.value()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ModuleTest, ::testing::ValuesIn(kModules),
                         [](const auto& info) { return info.param.name; });

TEST(MaterializeTest, KeepsIdentityTiesAndViews) {
  auto linear = Deferred([] { return Linear(kDim, kDim); });
  const at::Tensor weight = linear->weight;
  const at::Tensor row = weight.detach()[1];
  const at::Tensor same = linear->weight;
  ASSERT_OK(Materialize(*linear));
  EXPECT_TRUE(weight.is_same(linear->weight));
  EXPECT_EQ(row.data_ptr<float>(), weight.data_ptr<float>() + kDim);
  linear->forward(torch::ones({1, kDim})).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), torch::ones({kDim, kDim})));
  ASSERT_OK(Materialize(*linear));
  EXPECT_TRUE(weight.grad().defined());
}

TEST(MaterializeTest, WorksOnWhatLaterScopesHaveDone) {
  const auto make = [] {
    torch::manual_seed(1);
    return Deferred([] { return Linear(kDim, kDim); });
  };
  auto first = make();
  {
    const DeferredInit again(Everything());
    first->to(torch::kBFloat16);
    const c10::NoGradGuard no_grad;
    first->bias.zero_();
  }
  auto second = make();
  ASSERT_OK(Materialize(*first));
  ASSERT_OK(Materialize(*second));
  EXPECT_TRUE(at::equal(first->weight, second->weight.to(torch::kBFloat16)));
  EXPECT_TRUE(at::equal(first->bias, at::zeros({kDim}, at::kBFloat16)));
}

TEST(DeferredInitTest, AModuleGoesToADeviceWithoutMemory) {
  const auto linear = Deferred([] {
    Linear made(kDim, kDim);
    made->to(c10::Device(torch::kCUDA, 0));  // need not exist
    return made;
  });
  for (const at::Tensor& parameter : linear->parameters()) {
    EXPECT_EQ(parameter.device().type(), torch::kCUDA);
    EXPECT_TRUE(IsDeferred(parameter));
  }
}

TEST(MaterializeTest, AHistoryOfManyOperatorsEndsWithoutRecursion) {
  constexpr int kOps = 100'000;
  at::Tensor counter = Deferred([] {
    at::Tensor tensor = torch::zeros({1});
    for (int i = 0; i < kOps; ++i) tensor.add_(1);
    return tensor;
  });
  EXPECT_EQ(ValueOf(counter).item<float>(), kOps);
  counter.reset();
}

// --- What has values at once -------------------------------------------------

TEST(DeferredInitTest, SmallTensorsAreMadeAtOnce) {
  const DeferredInit deferred;
  EXPECT_TRUE(IsDeferred(torch::zeros({128, 128})));
  const at::Tensor small = torch::zeros({127, 129});
  EXPECT_FALSE(IsDeferred(small));
  EXPECT_EQ(small.sum().item<float>(), 0);
  EXPECT_FALSE(IsDeferred(torch::tensor({1, 2, 3})));
}

TEST(DeferredInitTest, ScopesEnd) {
  {
    const DeferredInit outer(Everything());
    EXPECT_TRUE(DeferredInit::IsActive());
    {
      const DeferredInit inner;
      EXPECT_FALSE(IsDeferred(torch::zeros({2})));
    }
    EXPECT_TRUE(IsDeferred(torch::zeros({2})));
    const EagerInit eager;
    EXPECT_FALSE(DeferredInit::IsActive());
    EXPECT_FALSE(IsDeferred(torch::zeros({2})));
  }
  EXPECT_FALSE(DeferredInit::IsActive());
  EXPECT_FALSE(IsDeferred(torch::zeros({2})));
}

TEST(DeferredInitTest, OrdinaryTensorsAreReadAndWritten) {
  at::Tensor ordinary = torch::zeros({3});
  const DeferredInit deferred(Everything());
  const at::Tensor three = torch::full({3}, 3.0);
  ordinary.copy_(three);
  EXPECT_EQ(ordinary.data_ptr<float>()[1], 3);
  EXPECT_FALSE(IsDeferred(ordinary + ordinary));
  EXPECT_TRUE(IsDeferred(three + ordinary));
}

// --- Errors ------------------------------------------------------------------

TEST(DeferredInitTest, UseOutsideAScopeSaysWhatToDo) {
  auto linear = Deferred([] { return Linear(kDim, kDim); });
  EXPECT_THAT(
      TorchToStatus("forward",
                    [&] {
                      linear->forward(torch::ones({1, kDim}));
                    }),
      StatusIs(Code::kFailedPrecondition, AllOf(HasSubstr("has no values yet"),
                                                HasSubstr("FullyShard()"))));
  const DeferredInit deferred(Everything());
  EXPECT_THAT(
      TorchToStatus("pointer", [] { torch::ones({3}).data_ptr<float>(); }),
      StatusIs(Code::kFailedPrecondition, HasSubstr("fsdp::EagerInit")));
}

TEST(DeferredInitTest, AWrongCallFailsWhereItIsMade) {
  const DeferredInit deferred(Everything());
  at::Tensor a = torch::zeros({3});
  EXPECT_THAT(
      TorchToStatus("copy", [&] { a.copy_(torch::ones({4})); }),
      StatusIs(Code::kInternal, HasSubstr("must match the size of tensor")));
  EXPECT_THAT(TorchToStatus("add", [&] { a + torch::ones({4}); }),
              StatusIs(Code::kInternal, HasSubstr("must match the size")));
}

TEST(DeferredInitTest, WhatItWasMadeFromMustNotChange) {
  at::Tensor big = torch::ones({200, 200});
  at::Tensor small = torch::ones({3});
  at::Tensor from_big;
  at::Tensor from_small;
  {
    const DeferredInit deferred({/*min_bytes=*/100});
    from_big = torch::zeros({200, 200}).copy_(big);
    from_small = torch::zeros({200, 3}).copy_(small);
  }
  small.zero_();
  EXPECT_TRUE(at::equal(ValueOf(from_small), torch::ones({200, 3})));
  EXPECT_TRUE(at::equal(ValueOf(from_big), big));
  big.zero_();
  EXPECT_THAT(TorchToStatus("value", [&] { ValueOf(from_big); }),
              StatusIs(Code::kFailedPrecondition, HasSubstr("changed since")));
}

}  // namespace
}  // namespace fsdp::testing
