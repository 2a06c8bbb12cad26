// How sharded units behave in autograd graphs of every shape, each against the
// same module without sharding.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::Rows;
using ::fsdp::testing::Unowned;
using ::torch::nn::Linear;

constexpr int64_t kDim = 5;
using Gradients = std::map<std::string, at::Tensor>;

// Gradients by parameter name, this rank's range in place and zero elsewhere;
// undefined ones are left out.
Gradients ShardGradients(const ShardedModuleBase& model) {
  Gradients result;
  for (const NamedShard& named : model.NamedShards()) {
    if (!named.shard.grad().defined()) continue;
    int64_t numel = 1;
    for (int64_t size : named.sizes) numel *= size;
    at::Tensor full = at::zeros({numel});
    full.narrow(0, named.begin, named.shard.numel()).copy_(named.shard.grad());
    result[named.name] = full;
  }
  return result;
}

// `net` makes a module, `loss` runs it. Gradients on two ranks, which see the
// same data, equal those of a plain module, and the same names have one.
template <typename Net>
absl::Status CheckGradients(
    Communicator& communicator, const Options& options,
    const std::function<std::shared_ptr<Net>()>& make_net,
    const std::function<at::Tensor(std::function<at::Tensor(at::Tensor)>)>&
        loss) {
  std::shared_ptr<Net> plain = make_net();
  loss([&](at::Tensor x) -> at::Tensor { return plain->forward(x); })
      .backward();
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<Net> model,
      FullyShard(make_net(), Unowned(communicator), options));
  FSDP_RETURN_IF_ERROR(
      model->Backward(loss([&](at::Tensor x) { return model->forward(x); })));
  Gradients actual = ShardGradients(*model);
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor expected = item.value().grad();
    const auto found = actual.find(item.key());
    if (expected.defined() != (found != actual.end())) {
      return absl::InternalError(absl::StrCat(
          item.key(), expected.defined() ? " has no" : " has a", " gradient"));
    }
    if (!expected.defined()) continue;
    at::Tensor sum = found->second;
    FSDP_ASSIGN_OR_RETURN(auto work, communicator.AllReduce(
                                         sum, comm::ReduceOp::kSum, "test"));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::InfiniteFuture()));
    // The storage order of all parameters compared here is row-major unless
    // they are transposed, as ranges of a shard are in storage order.
    const at::Tensor dense = item.value().is_contiguous()
                                 ? expected.reshape({-1})
                                 : expected.t().reshape({-1});
    if (!at::allclose(sum, dense, 1e-4, 1e-6)) {
      return absl::InternalError(absl::StrCat("gradient of ", item.key()));
    }
  }
  if (model->memory_stats().parameters.in_use_bytes != 0) {
    return absl::InternalError("unsharded memory is left");
  }
  return absl::OkStatus();
}

template <typename Net>
void ExpectSameGradients(
    const std::function<std::shared_ptr<Net>()>& make_net,
    const std::function<at::Tensor(std::function<at::Tensor(at::Tensor)>)>&
        loss,
    const Options& options) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) {
    return CheckGradients<Net>(communicator, options, make_net, loss);
  }));
}

template <typename Net>
std::shared_ptr<Net> Filled() {
  auto net = std::make_shared<Net>();
  FillParameters(*net, 1);
  return net;
}

at::Tensor SquareLoss(const std::function<at::Tensor(at::Tensor)>& forward) {
  return forward(Rows(0, 3, kDim)).square().mean();
}

// A linear layer as a unit of its own.
class UnitImpl : public torch::nn::Module {
 public:
  UnitImpl() : linear(register_module("linear", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  Linear linear;
};

template <typename... Units>
Options UnitsOf() {
  Options options;
  options.wrap_policy = WrapModules<Units...>();
  return options;
}

class UsedTwice : public torch::nn::Module {
 public:
  UsedTwice()
      : unit(register_module("unit", std::make_shared<UnitImpl>())),
        head(register_module("head", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(Forward(unit, Forward(unit, x).tanh()));
  }
  std::shared_ptr<UnitImpl> unit;
  Linear head;
};

TEST(AutogradSeamTest, AUnitUsedTwiceInOneForward) {
  ExpectSameGradients<UsedTwice>(Filled<UsedTwice>, SquareLoss,
                                 UnitsOf<UnitImpl>());
}

// Siamese: the uses are siblings, not one behind the other.
class UsedOnBothSides : public UsedTwice {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor left = Forward(unit, x);
    const at::Tensor right = Forward(unit, x * 2);
    return head->forward(left * right);
  }
};

TEST(AutogradSeamTest, AUnitUsedOnTwoBranches) {
  ExpectSameGradients<UsedOnBothSides>(Filled<UsedOnBothSides>, SquareLoss,
                                       UnitsOf<UnitImpl>());
}

class NestedImpl : public torch::nn::Module {
 public:
  NestedImpl()
      : inner(register_module("inner", std::make_shared<UnitImpl>())),
        own(register_module("own", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return own->forward(Forward(inner, own->forward(x)).tanh());
  }
  std::shared_ptr<UnitImpl> inner;
  Linear own;
};

class Outer : public torch::nn::Module {
 public:
  Outer() : nested(register_module("nested", std::make_shared<NestedImpl>())) {}
  at::Tensor forward(const at::Tensor& x) { return Forward(nested, x); }
  std::shared_ptr<NestedImpl> nested;
};

TEST(AutogradSeamTest, UnitsInsideUnitsAndARootThatOwnsNothing) {
  ExpectSameGradients<Outer>(Filled<Outer>, SquareLoss,
                             UnitsOf<UnitImpl, NestedImpl>());
}

class InPlaceOnOutput : public UsedTwice {
 public:
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = Forward(unit, x);
    y.narrow(1, 0, 2).mul_(3);
    at::relu_(y);
    return head->forward(y.view({-1, kDim}));
  }
};

TEST(AutogradSeamTest, OutputsAndTheirViewsModifiedInPlace) {
  ExpectSameGradients<InPlaceOnOutput>(Filled<InPlaceOnOutput>, SquareLoss,
                                       UnitsOf<UnitImpl>());
}

class TupleUnit : public torch::nn::Module {
 public:
  TupleUnit() : linear(register_module("linear", Linear(kDim, kDim))) {}
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    const at::Tensor y = linear->forward(x);
    return {y, {y * 2, x}};
  }
  Linear linear;
};

class TakesTuple : public torch::nn::Module {
 public:
  TakesTuple() : unit(register_module("unit", std::make_shared<TupleUnit>())) {}
  at::Tensor forward(const at::Tensor& x) {
    auto [y, more] = Forward(unit, x);
    return y + more[0] * more[1];
  }
  std::shared_ptr<TupleUnit> unit;
};

TEST(AutogradSeamTest, OutputsInTuplesAndVectorsAndInputsHandedThrough) {
  ExpectSameGradients<TakesTuple>(Filled<TakesTuple>, SquareLoss,
                                  UnitsOf<TupleUnit>());
}

// Uses only a part of what it computes, and one of its parameters not at all.
class PartlyUsed : public torch::nn::Module {
 public:
  PartlyUsed()
      : used(register_module("used", std::make_shared<UnitImpl>())),
        output_dropped(
            register_module("output_dropped", std::make_shared<UnitImpl>())),
        never_run(register_module("never_run", std::make_shared<UnitImpl>())),
        idle(register_module("idle", Linear(kDim, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    Forward(output_dropped, x);
    return Forward(used, x);
  }
  std::shared_ptr<UnitImpl> used, output_dropped, never_run;
  Linear idle;
};

TEST(AutogradSeamTest, UnusedOutputsUnitsAndParametersHaveNoGradient) {
  ExpectSameGradients<PartlyUsed>(Filled<PartlyUsed>, SquareLoss,
                                  UnitsOf<UnitImpl>());
}

class SparseEmbedding : public torch::nn::Module {
 public:
  SparseEmbedding()
      : weight(register_parameter("weight", at::zeros({11, kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor indices = at::arange(x.size(0)) * 3;
    return at::embedding(weight, indices, /*padding_idx=*/-1,
                         /*scale_grad_by_freq=*/false, /*sparse=*/true) *
           x;
  }
  at::Tensor weight;
};

TEST(AutogradSeamTest, SparseGradients) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto plain = Filled<SparseEmbedding>();
    SquareLoss([&](at::Tensor x) { return plain->forward(x); }).backward();
    FSDP_ASSIGN_OR_RETURN(
        FullyShardedDataParallel<SparseEmbedding> model,
        FullyShard(Filled<SparseEmbedding>(), Unowned(communicator)));
    FSDP_RETURN_IF_ERROR(model->Backward(
        SquareLoss([&](at::Tensor x) { return model->forward(x); })));
    const NamedShard& shard = model->NamedShards().front();
    const at::Tensor expected = plain->weight.grad().to_dense().view({-1});
    if (!at::allclose(shard.shard.grad(),
                      expected.narrow(0, shard.begin, shard.shard.numel()))) {
      return absl::InternalError("sparse gradient differs");
    }
    return absl::OkStatus();
  }));
}

class TransposedWeight : public torch::nn::Module {
 public:
  TransposedWeight()
      : weight(register_parameter("weight", at::zeros({3, kDim}).t())),
        scale(register_parameter("scale", at::zeros({}))) {}
  at::Tensor forward(const at::Tensor& x) {
    // expand() gives `scale` a gradient with stride 0.
    return x.matmul(weight) + scale.expand({x.size(0), 3});
  }
  at::Tensor weight, scale;
};

TEST(AutogradSeamTest, TransposedAndScalarParameters) {
  ExpectSameGradients<TransposedWeight>(
      [] {
        auto net = std::make_shared<TransposedWeight>();
        c10::NoGradGuard no_grad;
        net->weight.copy_(Rows(2, kDim, 3));
        net->scale.fill_(0.5);
        return net;
      },
      SquareLoss, Options());
}

// LoRA: a frozen trunk below and above what is trained.
class FrozenEnds : public torch::nn::Module {
 public:
  FrozenEnds()
      : first(register_module("first", std::make_shared<UnitImpl>())),
        middle(register_module("middle", std::make_shared<UnitImpl>())),
        last(register_module("last", std::make_shared<UnitImpl>())) {
    for (const auto& unit : {first, last}) {
      for (at::Tensor& p : unit->parameters()) p.set_requires_grad(false);
    }
    middle->linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(last, Forward(middle, Forward(first, x).tanh()).tanh());
  }
  std::shared_ptr<UnitImpl> first, middle, last;
};

TEST(AutogradSeamTest, FrozenUnitsAndFrozenParametersInATrainableUnit) {
  ExpectSameGradients<FrozenEnds>(Filled<FrozenEnds>, SquareLoss,
                                  UnitsOf<UnitImpl>());
}

TEST(AutogradSeamTest, GradientsReachTheInputThroughFrozenUnits) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        FullyShardedDataParallel<FrozenEnds> model,
        FullyShard(Filled<FrozenEnds>(), Unowned(communicator),
                   UnitsOf<UnitImpl>()));
    auto plain = Filled<FrozenEnds>();
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    const at::Tensor y = Rows(0, 2, kDim).requires_grad_();
    plain->forward(y).square().mean().backward();
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().mean()));
    if (!at::equal(x.grad(), y.grad())) return absl::InternalError("x.grad");
    if (model->memory_stats().parameters.in_use_bytes != 0) {
      return absl::InternalError("a frozen unit was not freed");
    }
    return absl::OkStatus();
  }));
}

TEST(AutogradSeamTest, FreezingAndUnfreezingBetweenSteps) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<UsedTwice> model,
                          FullyShard(Filled<UsedTwice>(), Unowned(communicator),
                                     UnitsOf<UnitImpl>()));
    const auto gradients_of_unit = [&]() -> absl::StatusOr<int> {
      FSDP_RETURN_IF_ERROR(model->Backward(
          SquareLoss([&](at::Tensor x) { return model->forward(x); })));
      int count = 0;
      for (const NamedShard& named : model->NamedShards()) {
        count += named.name.find("unit.") == 0 && named.shard.grad().defined();
        at::Tensor shard = named.shard;
        shard.mutable_grad().reset();
      }
      return count;
    };
    for (const auto& [trainable, expected] :
         std::vector<std::pair<bool, int>>{{true, 2}, {false, 1}, {true, 2}}) {
      FSDP_RETURN_IF_ERROR(
          model->SetTrainable("unit.linear.weight", trainable));
      FSDP_ASSIGN_OR_RETURN(const int count, gradients_of_unit());
      if (count != expected) return absl::InternalError(absl::StrCat(count));
    }
    // The flag of the module's own parameter is read at every forward, too.
    model->module()->unit->linear->bias.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(const int count, gradients_of_unit());
    if (count != 1) return absl::InternalError("bias was trained");
    return absl::OkStatus();
  }));
}

std::shared_ptr<torch::nn::SequentialImpl> MakeSequential() {
  auto net = std::make_shared<torch::nn::SequentialImpl>(
      Linear(kDim, 4), Linear(4, 4), Linear(4, kDim));
  FillParameters(*net, 3);
  return net;
}

TEST(AutogradSeamTest, SequentialChildrenAreUnitsWithoutAnyChangeToTheModel) {
  ExpectSameGradients<torch::nn::SequentialImpl>(
      MakeSequential, SquareLoss, UnitsOf<torch::nn::LinearImpl>());
}

TEST(AutogradSeamTest, RetainGraphAllowsASecondBackward) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<UsedTwice> model,
                          FullyShard(Filled<UsedTwice>(), Unowned(communicator),
                                     UnitsOf<UnitImpl>()));
    const at::Tensor loss =
        SquareLoss([&](at::Tensor x) { return model->forward(x); });
    FSDP_RETURN_IF_ERROR(model->Backward(loss, /*retain_graph=*/true));
    const at::Tensor once = model->Parameters()[0].grad().clone();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    if (!at::equal(model->Parameters()[0].grad(), 2 * once)) {
      return absl::InternalError("second backward");
    }
    return absl::OkStatus();
  }));
}

TEST(AutogradSeamTest, TwoForwardsThenTheirTwoBackwards) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto plain = Filled<UsedTwice>();
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<UsedTwice> model,
                          FullyShard(Filled<UsedTwice>(), Unowned(communicator),
                                     UnitsOf<UnitImpl>()));
    const at::Tensor a = model->forward(Rows(0, 2, kDim)).square().mean();
    const at::Tensor b = model->forward(Rows(5, 2, kDim)).square().mean();
    FSDP_RETURN_IF_ERROR(model->Backward(a));
    FSDP_RETURN_IF_ERROR(model->Backward(b));
    plain->forward(Rows(0, 2, kDim)).square().mean().backward();
    plain->forward(Rows(5, 2, kDim)).square().mean().backward();
    const NamedShard& shard = model->NamedShards()[0];
    const at::Tensor expected =
        plain->named_parameters()[shard.name].grad().reshape({-1});
    if (!at::allclose(shard.shard.grad(),
                      expected.narrow(0, shard.begin, shard.shard.numel()),
                      1e-4, 1e-6)) {
      return absl::InternalError("gradients of interleaved passes");
    }
    return absl::OkStatus();
  }));
}

// Control flow that depends on the data.
class MaybeUsed : public torch::nn::Module {
 public:
  MaybeUsed() : linear(register_module("linear", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x, bool use) {
    return use ? linear->forward(x) : x * 2;
  }
  Linear linear;
};

class RankDependent : public torch::nn::Module {
 public:
  RankDependent()
      : first(register_module("first", std::make_shared<UnitImpl>())),
        maybe(register_module("maybe", std::make_shared<MaybeUsed>())),
        last(register_module("last", std::make_shared<UnitImpl>())) {}
  at::Tensor forward(const at::Tensor& x, bool use) {
    return Forward(last, Forward(maybe, Forward(first, x), use));
  }
  std::shared_ptr<UnitImpl> first;
  std::shared_ptr<MaybeUsed> maybe;
  std::shared_ptr<UnitImpl> last;
};

// The other rank takes part in the reduction with zeros.
TEST(AutogradSeamTest, AUnitWhoseParametersOnlyOneRankUses) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        FullyShardedDataParallel<RankDependent> model,
        FullyShard(Filled<RankDependent>(), Unowned(communicator),
                   UnitsOf<UnitImpl, MaybeUsed>()));
    auto plain = Filled<RankDependent>();
    const at::Tensor x = Rows(0, 2, kDim);
    plain->forward(x, true).sum().backward();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(x, communicator.rank() == 0).sum()));
    for (const NamedShard& named : model->NamedShards()) {
      if (named.name != "maybe.linear.weight") continue;
      // The mean over two ranks, one of which has none.
      const at::Tensor expected =
          plain->maybe->linear->weight.grad().reshape({-1}) / 2;
      if (!at::allclose(named.shard.grad(),
                        expected.narrow(0, named.begin, named.shard.numel()))) {
        return absl::InternalError("gradient of one rank only");
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp
