// Transparent units: models of different shapes that know nothing of units,
// trained and compared with plain ones, over different iterations and in
// several models, and their costs in collectives and memory.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

// A training that both models do.
template <typename Net>
struct Training {
  Options options;
  std::function<std::shared_ptr<Net>()> make = Filled<Net>;
  int steps = 3;
  // Called on both before each step, on rank `rank` of the sharded model and on
  // the plain one before it sees the rows of that rank.
  std::function<void(Net&, int step, int rank)> before_forward = [](Net&, int,
                                                                    int) {};
};

// Checks losses, gradients by their effect on parameters, and the memory that
// is left after a step.
template <typename Net>
absl::Status CheckTraining(Communicator& world, const Training<Net>& training) {
  const int ranks = world.world_size();
  const auto task_of = [&](Net& net) {
    TrainingTask task;
    task.steps = training.steps;
    // Decay shows a gradient of zeros instead of none, momentum the order of
    // steps.
    task.optimizer = Sgd(0.1, /*weight_decay=*/0.01);
    task.loss = [&training, &net, ranks](const TensorFunction& forward,
                                         int64_t part) {
      training.before_forward(net, static_cast<int>(part / ranks),
                              static_cast<int>(part % ranks));
      return forward(Rows(3 * part, 3, kDim)).square().mean();
    };
    return task;
  };
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<Net> model,
      FullyShard(training.make(), Unowned(world), training.options));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                        RunSharded(task_of(*model->module()), model));
  const std::shared_ptr<Net> plain = training.make();
  return CheckSameRecord(actual, RunPlain(task_of(*plain), plain, ranks), 1e-4,
                         1e-5);
}

template <typename... Units>
Options Transparent() {
  Options options = UnitsOf<Units...>();
  options.transparent = true;
  return options;
}

template <typename Net>
void ExpectTrainsAsPlain(const Training<Net>& training) {
  for (int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(
        world_size,
        [&](Communicator& world) { return CheckTraining(world, training); }))
        << world_size << " ranks";
  }
}

template <typename Net, typename... Units>
void ExpectTrainsAsPlain() {
  ExpectTrainsAsPlain(Training<Net>{Transparent<Units...>()});
}

void ExpectTrainsAsPlain(const Mlp::Body& body) {
  ExpectTrainsAsPlain(Training<Mlp>{
      Transparent<LinearImpl>(), [&] { return std::make_shared<Mlp>(body); }});
}

// A unit with its own parameters around, between and after other units.
class Layer : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = up->forward(before->forward(x)).relu();
    return after->forward(x + down->forward(hidden));
  }
  torch::nn::LayerNorm before = register_module(
      "before", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
  Linear up = register_module("up", Linear(kDim, 2 * kDim));
  Linear down = register_module("down", Linear(2 * kDim, kDim));
  torch::nn::LayerNorm after = register_module(
      "after", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
};

class Nested : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return second->forward(first->forward(x * embed)) * scale;
  }
  at::Tensor embed = register_parameter("embed", at::ones({kDim}));
  std::shared_ptr<Layer> first =
      register_module("first", std::make_shared<Layer>());
  std::shared_ptr<Layer> second =
      register_module("second", std::make_shared<Layer>());
  at::Tensor scale = register_parameter("scale", at::ones({kDim}));
};

// --- Models of different shapes ----------------------------------------------

TEST(TransparentTest, UnitsUsedTwiceAndInTurns) {
  ExpectTrainsAsPlain([](Mlp& net, const at::Tensor& x) {
    const auto twice = net.first->forward(net.first->forward(x).tanh()).tanh();
    const at::Tensor y = net.second->forward(twice);
    return net.third->forward(net.first->forward(y.tanh()) +
                              net.second->forward(twice));
  });
}

TEST(TransparentTest, OperatorsThatTakeParametersOfSeveralUnits) {
  ExpectTrainsAsPlain([](Mlp& net, const at::Tensor& x) {
    const at::Tensor y =
        at::linear(x, net.first->weight, net.second->bias).tanh();
    const at::Tensor w =
        at::cat({net.first->weight, net.second->weight, net.third->weight});
    const at::Tensor z = at::linear(net.third->forward(y), w);
    return z.view({-1, 3, kDim}).sum(1) + net.first->bias;
  });
}

// A view outlives the use of its unit, and is used while another one computes.
TEST(TransparentTest, ViewsOfParameters) {
  ExpectTrainsAsPlain([](Mlp& net, const at::Tensor& x) {
    const at::Tensor transposed = net.first->weight.t();
    const at::Tensor row = net.second->weight[0];
    const at::Tensor y = net.second->forward(net.first->forward(x));
    return net.third->forward(y.matmul(transposed) * row);
  });
}

// Uses modules of LibTorch that pass lists of parameters, or views, to one
// operator.
class Library : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor sequence = std::get<0>(lstm->forward(x.unsqueeze(1)));
    const at::Tensor seen =
        std::get<0>(attention->forward(sequence, sequence, sequence));
    return tail->forward(seen.squeeze(1));
  }
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(kDim, kDim));
  torch::nn::MultiheadAttention attention = register_module(
      "attention", torch::nn::MultiheadAttention(
                       torch::nn::MultiheadAttentionOptions(kDim, 1)));
  torch::nn::Sequential tail = register_module(
      "tail", torch::nn::Sequential(Linear(kDim, kDim), torch::nn::GELU(),
                                    Linear(kDim, kDim)));
};

TEST(TransparentTest, ModulesOfLibTorch) {
  ExpectTrainsAsPlain<Library, torch::nn::LSTMImpl, LinearImpl,
                      torch::nn::MultiheadAttentionImpl>();
}

// Calls some children by fsdp::Forward and others directly.
class MixedCalls : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = middle->forward(Forward(first, x));
    return Forward(middle, Forward(second, y) + second->forward(y));
  }
  std::shared_ptr<Layer> first =
      register_module("first", std::make_shared<Layer>());
  std::shared_ptr<Layer> second =
      register_module("second", std::make_shared<Layer>());
  Linear middle = register_module("middle", Linear(kDim, kDim));
};

TEST(TransparentTest, BesideUnitsCalledByForward) {
  ExpectTrainsAsPlain<MixedCalls, Layer, LinearImpl>();
  ExpectTrainsAsPlain<MixedCalls, Layer>();
}

// --- What changes between iterations -----------------------------------------

TEST(TransparentTest, ControlFlowThatChanges) {
  Training<Mlp> training{Transparent<LinearImpl>()};
  training.steps = 8;
  training.before_forward = [](Mlp& net, int step, int) {
    const Mlp::Body bodies[] = {
        nullptr,
        [](Mlp& n, const at::Tensor& x) {
          return n.first->forward(n.third->forward(x).tanh());
        },
        [](Mlp& n, const at::Tensor& x) { return n.second->forward(x) + x; }};
    net.body = bodies[(step / 2 + step) % 3];
  };
  ExpectTrainsAsPlain(training);
}

// The weight is frozen: without the bias, no gradient reaches the unit.
TEST(TransparentTest, RanksThatUseDifferentParametersOfAUnit) {
  Training<Mlp> training{Transparent<LinearImpl>(), [] {
                           auto net = Filled<Mlp>();
                           net->second->weight.set_requires_grad(false);
                           return net;
                         }};
  training.before_forward = [](Mlp& net, int step, int rank) {
    net.body = [with_bias = (step + rank) % 2 == 0](Mlp& n,
                                                    const at::Tensor& x) {
      at::Tensor y = at::linear(n.first->forward(x), n.second->weight);
      if (with_bias) y = y + n.second->bias;
      return n.third->forward(y);
    };
  };
  ExpectTrainsAsPlain(training);
}

TEST(TransparentTest, AFrozenUnitIsFreedInBackwardBeforeTheNextIsGathered) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<Mlp>();
    for (at::Tensor& p : net->parameters()) p.set_requires_grad(false);
    Options options = Transparent<LinearImpl>();
    options.prefetch.forward = options.prefetch.backward = false;
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    int64_t one_unit = 0;
    {
      c10::NoGradGuard no_grad;
      model->forward(Rows(0, 2, kDim));
      one_unit = model->memory_stats().parameters.peak_in_use_bytes;
    }
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
    if (!x.grad().defined()) return absl::InternalError("no gradient of x");
    const PoolStats stats = model->memory_stats().parameters;
    EXPECT_EQ(stats.in_use_bytes, 0);
    return CheckThat(stats.peak_in_use_bytes, Eq(one_unit), "peak");
  }));
}

// The first operator on a unit runs without grad.
TEST(TransparentTest, AUnitFirstReadWithoutGrad) {
  ExpectTrainsAsPlain([](Mlp& net, const at::Tensor& x) {
    at::Tensor scale;
    {
      c10::NoGradGuard no_grad;
      scale = net.second->weight.norm();
    }
    return net.third->forward(net.second->forward(net.first->forward(x)) /
                              scale);
  });
}

// --- Several models ----------------------------------------------------------

using MlpModel = FullyShardedDataParallel<Mlp>;

absl::StatusOr<MlpModel> ShardMlp(Communicator& world) {
  return FullyShard(Filled<Mlp>(), Unowned(world), Transparent<LinearImpl>());
}

TEST(TransparentTest, TwoModelsInOneLoss) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(world));
    FSDP_ASSIGN_OR_RETURN(MlpModel other, ShardMlp(world));
    const at::Tensor x = Rows(world.rank(), 3, kDim);
    auto first = Filled<Mlp>();
    auto second = Filled<Mlp>();
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = other->forward(model->forward(x)).sum();
      const at::Tensor expected = second->forward(first->forward(x)).sum();
      FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, 1e-5, 1e-8, "loss"));
      loss.backward();
      model->zero_grad();
      other->zero_grad();
    }
    return absl::OkStatus();
  }));
}

// --- Collectives and memory --------------------------------------------------

struct Counts {
  int64_t gathers;
  int64_t reductions;
};

// Counts one step after two others.
template <typename Net>
absl::StatusOr<Counts> CountInSteadyState(const Options& options) {
  RecordedRanks ranks(2);
  std::vector<CollectiveLog>& logs = ranks.logs;
  FSDP_RETURN_IF_ERROR(
      AllOk(RunRanks(ranks.group, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(Filled<Net>(), Unowned(world), options));
        for (int step = 0; step < 3; ++step) {
          logs[world.rank()].Clear();
          FSDP_RETURN_IF_ERROR(
              model->Backward(model->forward(Rows(step, 3, kDim)).sum()));
        }
        return absl::OkStatus();
      })));
  return Counts{logs[0].TotalsOf(Collective::kAllGather).count,
                logs[0].TotalsOf(Collective::kReduceScatter).count};
}

TEST(TransparentTest, AStepTakes2nMinus1AllGathersAndNReduceScatters) {
  // The root owns nothing; there are three units with one use each.
  ASSERT_OK_AND_ASSIGN(Counts mlp,
                       CountInSteadyState<Mlp>(Transparent<LinearImpl>()));
  EXPECT_EQ(mlp.reductions, 3);
  EXPECT_EQ(mlp.gathers, 6);
  // There are the root, which is kept, and two units.
  ASSERT_OK_AND_ASSIGN(Counts nested,
                       CountInSteadyState<Nested>(Transparent<Layer>()));
  EXPECT_EQ(nested.reductions, 3);
  EXPECT_EQ(nested.gathers, 5);
}

TEST(TransparentTest,
     WithoutPrefetchAUnitThatBackwardDoesNotReadIsNotGathered) {
  // The gradient of the first weight does not depend on the weight.
  Options options = Transparent<LinearImpl>();
  options.prefetch.backward = false;
  ASSERT_OK_AND_ASSIGN(Counts counts, CountInSteadyState<Mlp>(options));
  EXPECT_EQ(counts.gathers, 5);
  EXPECT_EQ(counts.reductions, 3);
}

TEST(TransparentTest, HoldsTheUnitThatComputesAndTheNext) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(world));
    {
      // Nothing is prefetched in the first forward.
      c10::NoGradGuard no_grad;
      model->forward(Rows(0, 3, kDim));
    }
    const int64_t unit = model->memory_stats().parameters.peak_in_use_bytes;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = Rows(step, 3, kDim);
      const at::Tensor output = model->forward(x);
      EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0);
      FSDP_RETURN_IF_ERROR(model->Backward(output.sum()));
      const PoolStats stats = model->memory_stats().parameters;
      EXPECT_EQ(stats.in_use_bytes, 0);
      EXPECT_EQ(stats.peak_in_use_bytes, 2 * unit);
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
