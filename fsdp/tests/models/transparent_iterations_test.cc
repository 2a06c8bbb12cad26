// Transparent units over different iterations and in several models, and their
// costs in collectives and memory.
#include <ATen/ops/linear.h>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/models/transparent_training.h"

namespace fsdp::testing::transparent_nets {
namespace {

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
    const PoolStats stats = model->memory_stats().parameters;
    FSDP_RETURN_IF_ERROR(CheckThat(stats.in_use_bytes, Eq(0), "left"));
    return CheckThat(stats.peak_in_use_bytes, Eq(one_unit), "peak");
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

// --- Several models ----------------------------------------------------------

using MlpModel = FullyShardedDataParallel<Mlp>;

absl::StatusOr<MlpModel> ShardMlp(Communicator& communicator) {
  return FullyShard(Filled<Mlp>(), Unowned(communicator),
                    Transparent<torch::nn::LinearImpl>());
}

TEST(TransparentTest, TwoModelsInOneLoss) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(MlpModel model, ShardMlp(communicator));
    FSDP_ASSIGN_OR_RETURN(MlpModel other, ShardMlp(communicator));
    const at::Tensor x = Rows(communicator.rank(), 3, kDim);
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
  FSDP_RETURN_IF_ERROR(AllOk(
      RunRanks(ranks.group, [&](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model,
            FullyShard(Filled<Net>(), Unowned(communicator), options));
        for (int step = 0; step < 3; ++step) {
          logs[communicator.rank()].Clear();
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
  ASSERT_OK_AND_ASSIGN(Counts mlp, CountInSteadyState<Mlp>(
                                       Transparent<torch::nn::LinearImpl>()));
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
      FSDP_RETURN_IF_ERROR(
          CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                    "bytes of parameters after forward"));
      FSDP_RETURN_IF_ERROR(model->Backward(output.sum()));
      const PoolStats stats = model->memory_stats().parameters;
      FSDP_RETURN_IF_ERROR(CheckThat(stats.in_use_bytes, Eq(0), "left"));
      FSDP_RETURN_IF_ERROR(
          CheckThat(stats.peak_in_use_bytes, Eq(2 * unit), "peak"));
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing::transparent_nets
