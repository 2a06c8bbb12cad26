#include "fsdp/transparent/transparent.h"

// Models that know nothing of units, against a plain model.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/run_ranks.h"
#include "comm/wrappers/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/testing/training_check.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckTraining;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::Rows;
using ::fsdp::testing::Training;
using ::fsdp::testing::Unowned;
using ::torch::nn::Linear;

constexpr int64_t kDim = 5;

template <typename... Units>
Options Transparent() {
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapModules<Units...>();
  return options;
}

template <typename Net>
Training<Net> TrainingOf(Options options) {
  Training<Net> training;
  training.options = std::move(options);
  training.make_net = [] {
    auto net = std::make_shared<Net>();
    FillParameters(*net, 1);
    return net;
  };
  return training;
}

template <typename Net>
void ExpectTrainsAsPlain(const Training<Net>& training,
                         std::vector<int> world_sizes = {1, 2, 3}) {
  for (int world_size : world_sizes) {
    EXPECT_OK(RunAllRanks(world_size,
                          [&](Communicator& communicator) {
                            return CheckTraining(communicator, training);
                          }))
        << world_size << " ranks";
  }
}

template <typename Net, typename... Units>
void ExpectTrainsAsPlain(std::vector<int> world_sizes = {1, 2, 3}) {
  ExpectTrainsAsPlain(TrainingOf<Net>(Transparent<Units...>()), world_sizes);
}

// --- Shapes of models --------------------------------------------------------

class Mlp : public torch::nn::Module {
 public:
  Mlp()
      : first(register_module("first", Linear(kDim, kDim))),
        second(register_module("second", Linear(kDim, kDim))),
        third(register_module("third", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return third->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, second, third;
};

TEST(TransparentTest, ChildrenCalledDirectly) {
  ExpectTrainsAsPlain<Mlp, torch::nn::LinearImpl>();
}

TEST(TransparentTest, AllOptionsOfTheSchedule) {
  for (ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
        ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard}) {
    for (bool prefetch : {true, false}) {
      Options options = Transparent<torch::nn::LinearImpl>();
      options.unit.strategy = strategy;
      options.reshard_root_after_forward = prefetch;
      options.prefetch.forward = options.prefetch.backward = prefetch;
      ExpectTrainsAsPlain(TrainingOf<Mlp>(options), {2});
    }
  }
}

// A unit with parameters of its own around, between and after other units.
class Layer : public torch::nn::Module {
 public:
  Layer()
      : before(register_module(
            "before",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))),
        up(register_module("up", Linear(kDim, 2 * kDim))),
        down(register_module("down", Linear(2 * kDim, kDim))),
        after(register_module(
            "after",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = up->forward(before->forward(x)).relu();
    return after->forward(x + down->forward(hidden));
  }
  torch::nn::LayerNorm before;
  Linear up, down;
  torch::nn::LayerNorm after;
};

class Nested : public torch::nn::Module {
 public:
  Nested()
      : embed(register_parameter("embed", at::ones({kDim}))),
        first(register_module("first", std::make_shared<Layer>())),
        second(register_module("second", std::make_shared<Layer>())),
        scale(register_parameter("scale", at::ones({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second->forward(first->forward(x * embed)) * scale;
  }
  at::Tensor embed;
  std::shared_ptr<Layer> first, second;
  at::Tensor scale;
};

TEST(TransparentTest, UnitsInsideUnits) {
  ExpectTrainsAsPlain<Nested, Layer, torch::nn::LinearImpl>();
  ExpectTrainsAsPlain<Nested, Layer>();
}

// A child runs before and between parameters of its parent's own.
class ChildFirst : public torch::nn::Module {
 public:
  ChildFirst()
      : child(register_module("child", Linear(kDim, kDim))),
        own(register_parameter("own", at::ones({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return child->forward(child->forward(x).tanh() * own) * own;
  }
  Linear child;
  at::Tensor own;
};

class HoldsChildFirst : public torch::nn::Module {
 public:
  HoldsChildFirst()
      : inner(register_module("inner", std::make_shared<ChildFirst>())),
        head(register_module("head", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(inner->forward(x));
  }
  std::shared_ptr<ChildFirst> inner;
  Linear head;
};

TEST(TransparentTest, AChildThatRunsBeforeItsParentsOwnParameters) {
  ExpectTrainsAsPlain<HoldsChildFirst, ChildFirst, torch::nn::LinearImpl>();
}

// y = x w^T, with a weight that may be another module's.
class Project : public torch::nn::Module {
 public:
  explicit Project(const at::Tensor& w)
      : weight(register_parameter("weight", w)) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

class Tied : public torch::nn::Module {
 public:
  Tied()
      : first(register_module("first", Linear(kDim, kDim))),
        middle(register_module("middle", Linear(kDim, kDim))),
        last(register_module("last",
                             std::make_shared<Project>(first->weight))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(middle->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, middle;
  std::shared_ptr<Project> last;
};

TEST(TransparentTest, TiedParametersBelongToTheRoot) {
  ExpectTrainsAsPlain<Tied, torch::nn::LinearImpl, Project>();
}

class Interleaved : public torch::nn::Module {
 public:
  Interleaved()
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = a->forward(a->forward(x).tanh()).tanh();
    return a->forward(b->forward(y).tanh()) + b->forward(y);
  }
  Linear a, b;
};

TEST(TransparentTest, UnitsUsedTwiceAndInTurns) {
  ExpectTrainsAsPlain<Interleaved, torch::nn::LinearImpl>();
}

// One operator takes parameters of several units.
class Mixed : public torch::nn::Module {
 public:
  Mixed()
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))),
        c(register_module("c", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::linear(x, a->weight, b->bias).tanh();
    const at::Tensor w = at::cat({a->weight, b->weight, c->weight});
    const at::Tensor z = at::linear(c->forward(y), w).view({-1, 3, kDim});
    return z.sum(1) + a->bias;
  }
  Linear a, b, c;
};

TEST(TransparentTest, OperatorsThatTakeParametersOfSeveralUnits) {
  ExpectTrainsAsPlain<Mixed, torch::nn::LinearImpl>();
}

// A view outlives the use of its unit, and is used while another one computes.
class Views : public torch::nn::Module {
 public:
  Views()
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor transposed = a->weight.t();
    const at::Tensor row = b->weight[0];
    return b->forward(a->forward(x)).matmul(transposed) * row;
  }
  Linear a, b;
};

TEST(TransparentTest, ViewsOfParameters) {
  ExpectTrainsAsPlain<Views, torch::nn::LinearImpl>();
}

// Modules of LibTorch that hand lists of parameters to one operator, or views.
class Library : public torch::nn::Module {
 public:
  Library()
      : lstm(register_module("lstm", torch::nn::LSTM(kDim, kDim))),
        attention(register_module(
            "attention", torch::nn::MultiheadAttention(
                             torch::nn::MultiheadAttentionOptions(kDim, 1)))),
        tail(register_module(
            "tail", torch::nn::Sequential(Linear(kDim, kDim), torch::nn::GELU(),
                                          Linear(kDim, kDim)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor sequence = std::get<0>(lstm->forward(x.unsqueeze(1)));
    const at::Tensor seen =
        std::get<0>(attention->forward(sequence, sequence, sequence));
    return tail->forward(seen.squeeze(1));
  }
  torch::nn::LSTM lstm;
  torch::nn::MultiheadAttention attention;
  torch::nn::Sequential tail;
};

TEST(TransparentTest, ModulesOfLibTorch) {
  ExpectTrainsAsPlain<Library, torch::nn::LSTMImpl, torch::nn::LinearImpl,
                      torch::nn::MultiheadAttentionImpl>();
}

// Children called by fsdp::Forward beside children called directly.
class MixedCalls : public torch::nn::Module {
 public:
  MixedCalls()
      : first(register_module("first", std::make_shared<Layer>())),
        second(register_module("second", std::make_shared<Layer>())),
        middle(register_module("middle", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = middle->forward(Forward(first, x));
    return Forward(middle, Forward(second, y) + second->forward(y));
  }
  std::shared_ptr<Layer> first, second;
  Linear middle;
};

TEST(TransparentTest, BesideUnitsCalledByForward) {
  ExpectTrainsAsPlain<MixedCalls, Layer, torch::nn::LinearImpl>();
  ExpectTrainsAsPlain<MixedCalls, Layer>();
}

// --- What changes between iterations -----------------------------------------

class Choosing : public Mlp {
 public:
  at::Tensor forward(const at::Tensor& x) {
    if (choice == 0) return Mlp::forward(x);
    if (choice == 1) return first->forward(third->forward(x).tanh());
    return second->forward(x) + x;
  }
  int choice = 0;
};

TEST(TransparentTest, ControlFlowThatChanges) {
  Training<Choosing> training =
      TrainingOf<Choosing>(Transparent<torch::nn::LinearImpl>());
  training.steps = 8;
  training.before_forward = [](Choosing& net, int step, int) {
    net.choice = (step / 2 + step) % 3;
  };
  ExpectTrainsAsPlain(training);
}

// The weight is frozen: without the bias, no gradient reaches the unit.
class DataDependent : public Mlp {
 public:
  DataDependent() { second->weight.set_requires_grad(false); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::linear(first->forward(x), second->weight);
    if (with_bias) y = y + second->bias;
    return third->forward(y);
  }
  bool with_bias = false;
};

TEST(TransparentTest, RanksThatUseDifferentParametersOfAUnit) {
  Training<DataDependent> training =
      TrainingOf<DataDependent>(Transparent<torch::nn::LinearImpl>());
  training.before_forward = [](DataDependent& net, int step, int rank) {
    net.with_bias = (step + rank) % 2 == 0;
  };
  ExpectTrainsAsPlain(training);
}

class FrozenEnds : public Mlp {
 public:
  FrozenEnds() {
    for (const Linear& linear : {first, third}) {
      for (at::Tensor& p : linear->parameters()) p.set_requires_grad(false);
    }
    second->bias.set_requires_grad(false);
  }
};

TEST(TransparentTest, FrozenUnitsAndParameters) {
  ExpectTrainsAsPlain<FrozenEnds, torch::nn::LinearImpl>();
}

TEST(TransparentTest, AFrozenUnitIsFreedInBackwardBeforeTheNextIsGathered) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    auto net = std::make_shared<Mlp>();
    for (at::Tensor& p : net->parameters()) p.set_requires_grad(false);
    Options options = Transparent<torch::nn::LinearImpl>();
    options.prefetch.forward = options.prefetch.backward = false;
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(communicator), options));
    int64_t one_unit = 0;
    {
      c10::NoGradGuard no_grad;
      model->forward(Rows(0, 2, kDim));
      one_unit = model->memory_stats().parameters.peak_in_use_bytes;
    }
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    if (!x.grad().defined()) return absl::InternalError("no gradient of x");
    const BufferPool::Stats stats = model->memory_stats().parameters;
    if (stats.in_use_bytes != 0 || stats.peak_in_use_bytes != one_unit) {
      return absl::InternalError(absl::StrCat("peak ", stats.peak_in_use_bytes,
                                              " not ", one_unit, ", left ",
                                              stats.in_use_bytes));
    }
    return absl::OkStatus();
  }));
}

// The first operator on a unit runs without grad.
class LooksFirst : public Mlp {
 public:
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor scale;
    {
      c10::NoGradGuard no_grad;
      scale = second->weight.norm();
    }
    return third->forward(second->forward(first->forward(x)) / scale);
  }
};

TEST(TransparentTest, AUnitFirstReadWithoutGrad) {
  ExpectTrainsAsPlain<LooksFirst, torch::nn::LinearImpl>();
}

// --- Evaluation, and several forwards or backwards ---------------------------

using MlpModel = FullyShardedDataParallel<Mlp>;

absl::StatusOr<MlpModel> ShardMlp(Communicator& communicator) {
  return FullyShard(TrainingOf<Mlp>({}).make_net(), Unowned(communicator),
                    Transparent<torch::nn::LinearImpl>());
}

std::vector<at::Tensor> TakeGradients(MlpModel& model) {
  std::vector<at::Tensor> gradients;
  for (at::Tensor& shard : model->Parameters()) {
    gradients.push_back(shard.grad().clone());
    shard.mutable_grad().reset();
  }
  return gradients;
}

absl::Status CheckEqual(const std::vector<at::Tensor>& actual,
                        const std::vector<at::Tensor>& expected,
                        double factor) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!at::allclose(actual[i], expected[i] * factor)) {
      return absl::InternalError(absl::StrCat("gradient ", i));
    }
  }
  return absl::OkStatus();
}

TEST(TransparentTest, EvaluationWithoutGradAndInInferenceMode) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    const at::Tensor x = Rows(0, 3, kDim);
    const at::Tensor expected = TrainingOf<Mlp>({}).make_net()->forward(x);
    for (int round = 0; round < 2; ++round) {
      {
        c10::NoGradGuard no_grad;
        if (!at::allclose(model->forward(x), expected)) {
          return absl::InternalError("without grad");
        }
      }
      {
        c10::InferenceMode inference;
        if (!at::allclose(model->forward(x), expected)) {
          return absl::InternalError("in inference mode");
        }
      }
      if (model->memory_stats().parameters.in_use_bytes != 0) {
        return absl::InternalError("memory is left");
      }
      const at::Tensor output = model->forward(x);
      if (!at::allclose(output, expected)) return absl::InternalError("train");
      FSDP_RETURN_IF_ERROR(model->Backward(output.sum()));
    }
    return absl::OkStatus();
  }));
}

TEST(TransparentTest, SeveralBackwardsThroughOneGraph) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    const at::Tensor x = Rows(communicator.rank(), 3, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    const std::vector<at::Tensor> once = TakeGradients(model);
    const at::Tensor loss = model->forward(x).sum();
    FSDP_RETURN_IF_ERROR(model->Backward(loss, /*retain_graph=*/true));
    FSDP_RETURN_IF_ERROR(model->Backward(loss, /*retain_graph=*/true));
    loss.backward();
    return CheckEqual(TakeGradients(model), once, 3);
  }));
}

TEST(TransparentTest, SeveralForwardsBeforeTheirBackwards) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    const at::Tensor x = Rows(communicator.rank(), 3, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    const std::vector<at::Tensor> once = TakeGradients(model);
    const at::Tensor first = model->forward(x).sum();
    const at::Tensor second = model->forward(x).sum();
    first.backward();
    second.backward();
    FSDP_RETURN_IF_ERROR(CheckEqual(TakeGradients(model), once, 2));
    const at::Tensor sum = model->forward(x).sum() + model->forward(x).sum();
    FSDP_RETURN_IF_ERROR(model->Backward(sum));
    return CheckEqual(TakeGradients(model), once, 2);
  }));
}

TEST(TransparentTest, TwoModelsInOneLoss) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    FSDP_ASSIGN_OR_RETURN(MlpModel other, ShardMlp(communicator));
    const at::Tensor x = Rows(communicator.rank(), 3, kDim);
    auto first = TrainingOf<Mlp>({}).make_net();
    auto second = TrainingOf<Mlp>({}).make_net();
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = other->forward(model->forward(x)).sum();
      const at::Tensor expected = second->forward(first->forward(x)).sum();
      if (!at::allclose(loss, expected)) return absl::InternalError("loss");
      loss.backward();
      TakeGradients(model);
      TakeGradients(other);
    }
    return absl::OkStatus();
  }));
}

// --- Collectives and memory --------------------------------------------------

struct Counts {
  int64_t gathers;
  int64_t reductions;
};

// Of one step after two others.
template <typename Net>
absl::StatusOr<Counts> CountInSteadyState(const Options& options) {
  FSDP_ASSIGN_OR_RETURN(auto group, comm::CreateLocalGroup(2));
  std::vector<comm::CollectiveLog> logs(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
  }
  Training<Net> training = TrainingOf<Net>(options);
  FSDP_RETURN_IF_ERROR(AllOk(comm::testing::RunRanks(
      group, [&](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model,
            FullyShard(training.make_net(), Unowned(communicator), options));
        for (int step = 0; step < 3; ++step) {
          logs[communicator.rank()].Clear();
          FSDP_RETURN_IF_ERROR(
              model->Backward(model->forward(Rows(step, 3, kDim)).sum()));
        }
        return absl::OkStatus();
      })));
  return Counts{logs[0].TotalsOf(comm::Collective::kAllGather).count,
                logs[0].TotalsOf(comm::Collective::kReduceScatter).count};
}

TEST(TransparentTest, AStepTakes2nMinus1AllGathersAndNReduceScatters) {
  // The root owns nothing: three units of one use each.
  ASSERT_OK_AND_ASSIGN(Counts mlp, CountInSteadyState<Mlp>(
                                       Transparent<torch::nn::LinearImpl>()));
  EXPECT_EQ(mlp.reductions, 3);
  EXPECT_EQ(mlp.gathers, 6);
  // The root, which is kept, and two units.
  ASSERT_OK_AND_ASSIGN(Counts nested,
                       CountInSteadyState<Nested>(Transparent<Layer>()));
  EXPECT_EQ(nested.reductions, 3);
  EXPECT_EQ(nested.gathers, 5);
}

TEST(TransparentTest,
     WithoutPrefetchAUnitThatBackwardDoesNotReadIsNotGathered) {
  // The gradient of the first weight does not depend on the weight.
  Options options = Transparent<torch::nn::LinearImpl>();
  options.prefetch.backward = false;
  ASSERT_OK_AND_ASSIGN(Counts counts, CountInSteadyState<Mlp>(options));
  EXPECT_EQ(counts.gathers, 5);
  EXPECT_EQ(counts.reductions, 3);
}

TEST(TransparentTest, HoldsTheUnitThatComputesAndTheNext) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    {
      // Nothing is prefetched in the first forward.
      c10::NoGradGuard no_grad;
      model->forward(Rows(0, 3, kDim));
    }
    const int64_t unit = model->memory_stats().parameters.peak_in_use_bytes;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = Rows(step, 3, kDim);
      const at::Tensor output = model->forward(x);
      if (model->memory_stats().parameters.in_use_bytes != 0) {
        return absl::InternalError("memory is left after forward");
      }
      FSDP_RETURN_IF_ERROR(model->Backward(output.sum()));
      const BufferPool::Stats stats = model->memory_stats().parameters;
      if (stats.in_use_bytes != 0 || stats.peak_in_use_bytes != 2 * unit) {
        return absl::InternalError(absl::StrCat(
            "peak ", stats.peak_in_use_bytes, ", left ", stats.in_use_bytes));
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp
