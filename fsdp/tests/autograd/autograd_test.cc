
// Sharded units in autograd graphs of every shape, each compared with the same
// module without sharding.
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include <thread>

#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

template <typename Net, typename... Units>
void ExpectAsPlain() {
  ExpectSameGradients<Net>(Filled<Net>, SquareLoss, UnitsOf<Units...>());
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

TEST(AutogradTest, OutputsInTuplesAndVectorsAndInputsHandedThrough) {
  ExpectAsPlain<TakesTuple, TupleUnit>();
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

TEST(AutogradTest, SparseGradients) { ExpectAsPlain<SparseEmbedding>(); }

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

TEST(AutogradTest, TransposedAndScalarParameters) {
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

// Runs each forward on a thread of its own, which has ended when backward
// begins.
absl::Status TwoForwardsOnThreads(Communicator& world, bool one_backward) {
  FSDP_ASSIGN_OR_RETURN(
      auto model,
      FullyShard(Filled<UsedTwice>(), Unowned(world), UnitsOf<UnitImpl>()));
  auto plain = Filled<UsedTwice>();
  const auto loss_of = [&](const std::function<at::Tensor(at::Tensor)>& net,
                           int64_t row) {
    at::Tensor loss;
    std::thread thread([&] { loss = net(Rows(row, 2, kDim)).square().mean(); });
    thread.join();
    return loss;
  };
  std::vector<at::Tensor> losses;
  for (const int64_t row : {0, 5}) {
    loss_of([&](const at::Tensor& x) { return plain->forward(x); }, row)
        .backward();
    losses.push_back(
        loss_of([&](const at::Tensor& x) { return model->forward(x); }, row));
    if (!one_backward) FSDP_RETURN_IF_ERROR(model->Backward(losses.back()));
  }
  if (one_backward) {
    FSDP_RETURN_IF_ERROR(model->Backward(losses[0] + losses[1]));
  }
  const TensorRange& shard = model->Ranges()[0];
  const at::Tensor expected =
      plain->named_parameters()[shard.name].grad().reshape({-1});
  return CheckTensor(shard.values.grad(), OwnPart(shard, expected), 1e-4, 1e-6,
                     "gradient of forwards on threads");
}

TEST(AutogradTest, ForwardsOnThreadsWithABackwardForEach) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) {
    return TwoForwardsOnThreads(world, /*one_backward=*/false);
  }));
}

TEST(AutogradTest, OneBackwardThroughForwardsOfTwoThreadsIsRefused) {
  EXPECT_THAT(RunAllRanks(2,
                          [](Communicator& world) {
                            return TwoForwardsOnThreads(world,
                                                        /*one_backward=*/true);
                          }),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("through forwards of two threads")));
}

// A net whose control flow depends on the data.
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

// Runs the net of rank 0 with the parameters that depend on data, and that of
// rank 1 without them: rank 1 takes part in their reduction with zeros.
template <typename Net>
void ExpectMeanOfBoth(const Options& options) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<Net>(), Unowned(communicator), options));
    auto plain = Filled<Net>();
    const at::Tensor x = Rows(0, 2, kDim);
    (plain->forward(x, true).sum() + plain->forward(x, false).sum()).backward();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(x, communicator.rank() == 0).sum()));
    const auto parameters = plain->named_parameters();
    for (const TensorRange& named : model->Ranges()) {
      FSDP_RETURN_IF_ERROR(
          CheckTensor(named.values.grad(),
                      OwnPart(named, parameters[named.name].grad() / 2), 1e-5,
                      1e-8, absl::StrCat("gradient of ", named.name)));
    }
    return absl::OkStatus();
  }));
}

TEST(AutogradTest, AUnitWhoseParametersOnlyOneRankUses) {
  ExpectMeanOfBoth<RankDependent>(UnitsOf<UnitImpl, MaybeUsed>());
}

// The surrounding unit computes its own gradients last on both ranks.
class MaybeUsedInside : public torch::nn::Module {
 public:
  MaybeUsedInside()
      : maybe(register_module("maybe", std::make_shared<MaybeUsed>())),
        own(register_module("own", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x, bool use) {
    return Forward(maybe, own->forward(x), use);
  }
  std::shared_ptr<MaybeUsed> maybe;
  Linear own;
};

class RankDependentInside : public torch::nn::Module {
 public:
  RankDependentInside()
      : around(register_module("around", std::make_shared<MaybeUsedInside>())) {
  }
  at::Tensor forward(const at::Tensor& x, bool use) {
    return Forward(around, x, use);
  }
  std::shared_ptr<MaybeUsedInside> around;
};

TEST(AutogradTest, AUnitInsideAnotherWhoseParametersOnlyOneRankUses) {
  ExpectMeanOfBoth<RankDependentInside>(UnitsOf<MaybeUsedInside, MaybeUsed>());
}

}  // namespace
}  // namespace fsdp::testing
