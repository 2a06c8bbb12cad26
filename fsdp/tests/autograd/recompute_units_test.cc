// With Options::recompute.units, activations are not kept and units run as
// often as chosen. KnownProgramTest compares values with plain LibTorch's.
#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::BatchNorm1d;
using ::torch::nn::BatchNorm1dImpl;
using ::torch::nn::LinearImpl;

constexpr int64_t kRows = 4;
constexpr int kBlocks = 3;

// Computes x + out(tanh(norm(fc(x)))), counts its runs, and notes what it has
// computed since the last Clear().
class BlockImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    ++runs;
    const at::Tensor hidden = norm->forward(fc->forward(x)).tanh();
    computed_.emplace_back(hidden.getIntrusivePtr());
    const at::Tensor kept = at::dropout(hidden, dropout, is_training());
    return x + out->forward(kept);
  }

  int num_alive() const {
    int alive = 0;
    for (const Weak& tensor : computed_) alive += !tensor.expired();
    return alive;
  }

  Linear fc = register_module("fc", Linear(kDim, kDim));
  BatchNorm1d norm = register_module("norm", BatchNorm1d(kDim));
  Linear out = register_module("out", Linear(kDim, kDim));
  double dropout = 0;
  int runs = 0;

 private:
  using Weak =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<Weak> computed_;
};

// How the net calls its blocks.
enum class Calls { kForward, kSequential };

class Net : public torch::nn::Module {
 public:
  explicit Net(Calls calls, double dropout = 0)
      : embed(register_module("embed", Linear(kDim, kDim))), calls_(calls) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(std::make_shared<BlockImpl>());
      blocks.back()->dropout = dropout;
      sequence->push_back(blocks.back());
    }
    register_module("blocks", sequence);
    testing::FillParameters(*this, 1);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = embed->forward(x).sin();
    if (calls_ == Calls::kSequential) return sequence->forward(y);
    for (const auto& block : blocks) y = Forward(block, y);
    return y;
  }

  Linear embed;
  torch::nn::Sequential sequence;
  std::vector<std::shared_ptr<BlockImpl>> blocks;

 private:
  const Calls calls_;
};

at::Tensor RowsOf(int rank, int micro) {
  return Rows(rank * 100 + micro * 10, kRows, kDim);
}

Options BlockUnits() { return GoOn(UnitsOf<BlockImpl>()); }

Options Recomputing(Options options) {
  options.recompute.units = WrapModules<BlockImpl>();
  return options;
}

// Runs two micro-batches; only the second reduces.
template <typename Model>
absl::Status Accumulate(Model& model, int rank, int step) {
  for (int micro = 0; micro < 2; ++micro) {
    std::optional<NoSyncScope> no_sync;
    if (micro == 0) no_sync.emplace(model->NoSync());
    FSDP_RETURN_IF_ERROR(model->Backward(
        model->forward(RowsOf(rank, 2 * step + micro)).square().sum()));
  }
  return absl::OkStatus();
}

absl::Status CheckKept(Communicator& world, Calls calls, bool transparent,
                       bool recomputes) {
  Options options = BlockUnits();
  options.transparent = transparent;
  FSDP_ASSIGN_OR_RETURN(
      auto model, FullyShard(std::make_shared<Net>(calls), Unowned(world),
                             recomputes ? Recomputing(options) : options));
  const at::Tensor loss = model->forward(RowsOf(world.rank(), 0)).sum();
  for (const auto& block : model->module()->blocks) {
    FSDP_RETURN_IF_ERROR(CheckThat(block->num_alive(), Eq(recomputes ? 0 : 1),
                                   "count of activations that are kept"));
  }
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  for (const auto& block : model->module()->blocks) {
    if (block->runs != (recomputes ? 2 : 1) || block->num_alive() != 0) {
      return absl::InternalError(
          absl::StrCat(block->runs, " runs, alive: ", block->num_alive()));
    }
  }
  return absl::OkStatus();
}

TEST(RecomputedMemoryTest, ActivationsLiveOnlyWhileTheirUnitIsInBackward) {
  for (const Calls calls : {Calls::kForward, Calls::kSequential}) {
    for (const bool transparent : {false, true}) {
      for (const bool recomputes : {false, true}) {
        EXPECT_OK(RunAllRanks(2,
                              [&](Communicator& world) {
                                return CheckKept(world, calls, transparent,
                                                 recomputes);
                              }))
            << static_cast<int>(calls) << transparent << recomputes;
      }
    }
  }
}

// This holds in both runs.
TEST(RecomputedUnitTest, InputsAreCastToWhatAUnitComputesIn) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.precision.cast_inputs = CastInputs::kEveryUnit;
    FSDP_ASSIGN_OR_RETURN(auto keeps,
                          FullyShard(std::make_shared<Net>(Calls::kForward),
                                     Unowned(world), options));
    FSDP_RETURN_IF_ERROR(Accumulate(keeps, world.rank(), 0));
    for (const Calls calls : {Calls::kForward, Calls::kSequential}) {
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(std::make_shared<Net>(calls), Unowned(world),
                                 Recomputing(options)));
      FSDP_RETURN_IF_ERROR(Accumulate(model, world.rank(), 0));
      FSDP_RETURN_IF_ERROR(CheckSameGradients(*model, *keeps));
    }
    return absl::OkStatus();
  }));
}

// Only one rank may draw random numbers of this process.
TEST(RecomputedUnitTest, DropoutIsTheSameTheSecondTime) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(std::make_shared<Net>(Calls::kForward, 0.5),
                               Unowned(world), Recomputing(BlockUnits())));
    Net plain(Calls::kForward, 0.5);
    at::manual_seed(7);
    plain.forward(RowsOf(0, 0)).square().sum().backward();
    at::manual_seed(7);
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(RowsOf(0, 0)).square().sum()));
    return CheckMeans(*model, plain, /*world_size=*/1, 0, 0);
  }));
}

// The BatchNorm is in no unit: only the unit's module knows its buffers.
TEST(RecomputedUnitTest, BuffersOfIgnoredModulesInsideCountABatchOnce) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = Recomputing(BlockUnits());
    options.ignore.module = [](const std::string&, const auto& module) {
      return dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr;
    };
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<Net>(Calls::kForward),
                                     Unowned(world), options));
    Net plain(Calls::kForward);
    const at::Tensor x = RowsOf(world.rank(), 0);
    plain.forward(x);
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().sum()));
    return SameBuffers(*model->module(), plain);
  }));
}

TEST(RecomputedUnitTest, ArgumentsMayRestInAFile) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = Recomputing(BlockUnits());
    FSDP_ASSIGN_OR_RETURN(auto reference,
                          FullyShard(std::make_shared<Net>(Calls::kForward),
                                     Unowned(world), options));
    FSDP_RETURN_IF_ERROR(Accumulate(reference, world.rank(), 0));
    ActivationOffloadOptions offload;
    offload.min_bytes = 1;
    FSDP_ASSIGN_OR_RETURN(
        options.recompute.options.offload,
        ActivationOffload::MakeInFile(::testing::TempDir(), 1 << 20, offload));
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<Net>(Calls::kForward),
                                     Unowned(world), options));
    FSDP_RETURN_IF_ERROR(Accumulate(model, world.rank(), 0));
    EXPECT_GT(options.recompute.options.offload->stats().peak_stored_bytes, 0);
    return CheckSameGradients(*model, *reference);
  }));
}

// Takes and returns two tensors, and has a block inside.
class OuterImpl : public torch::nn::Module {
 public:
  std::tuple<at::Tensor, at::Tensor> forward(
      const std::pair<at::Tensor, at::Tensor>& x, double factor) {
    ++runs;
    const at::Tensor y = Forward(block, mix->forward(x.first) * factor);
    return {y + x.second, y.narrow(0, 0, 2)};
  }
  std::shared_ptr<BlockImpl> block =
      register_module("block", std::make_shared<BlockImpl>());
  Linear mix = register_module("mix", Linear(kDim, kDim));
  int runs = 0;
};

class Nested : public torch::nn::Module {
 public:
  Nested() { testing::FillParameters(*this, 1); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = head->forward(x);
    const auto [first, second] =
        Forward(outer, std::make_pair(y.sin(), y.cos()), 0.5);
    return first.sum() + second.square().sum();
  }
  std::shared_ptr<OuterImpl> outer =
      register_module("outer", std::make_shared<OuterImpl>());
  Linear head = register_module("head", Linear(kDim, kDim));
};

// Checks how often the outer unit and the one inside run in a step.
absl::Status CheckNested(Communicator& world, const WrapPolicy& recomputed,
                         int outer_runs, int inner_runs) {
  Options options = testing::UnitsOf<BlockImpl, OuterImpl>();
  options.recompute.units = recomputed;
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(std::make_shared<Nested>(),
                                               Unowned(world), options));
  std::vector<std::shared_ptr<Nested>> plain;  // of all ranks
  for (int rank = 0; rank < world.world_size(); ++rank) {
    plain.push_back(std::make_shared<Nested>());
    plain.back()->forward(RowsOf(rank, 0)).backward();
  }
  FSDP_RETURN_IF_ERROR(
      model->Backward(model->forward(RowsOf(world.rank(), 0))));
  const OuterImpl& outer = *model->module()->outer;
  EXPECT_EQ(outer.runs, outer_runs);
  EXPECT_EQ(outer.block->runs, inner_runs);
  FSDP_RETURN_IF_ERROR(SameBuffers(*model->module(), *plain[world.rank()]));
  return CheckOwnGradients(*model, MeansOf(plain), 1e-4, 1e-5);
}

TEST(RecomputedUnitTest, UnitsInsideUnitsAreRecomputedAsChosen) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_RETURN_IF_ERROR(CheckNested(world, nullptr, 1, 1));
    FSDP_RETURN_IF_ERROR(CheckNested(world, WrapModules<BlockImpl>(), 1, 2));
    FSDP_RETURN_IF_ERROR(CheckNested(world, WrapModules<OuterImpl>(), 2, 2));
    const WrapPolicy by_name = [](const WrapCandidate& candidate) {
      return candidate.path == "outer.block";
    };
    FSDP_RETURN_IF_ERROR(CheckNested(world, by_name, 1, 2));
    return CheckNested(world, EveryUnit(), 2, 3);
  }));
}

}  // namespace
}  // namespace fsdp::testing
