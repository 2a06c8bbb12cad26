// Options::recompute.units refuses, on all ranks, choices that are no units and
// calls that cannot be repeated.
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/model/forward.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

WrapPolicy At(const std::string& path) {
  return
      [path](const WrapCandidate& candidate) { return candidate.path == path; };
}

WrapPolicy None() {
  return [](const WrapCandidate&) { return false; };
}

// --- When the model is sharded ----------------------------------------------

// `options_of` returns the options of a rank.
void ExpectNotSharded(const std::function<Options(int)>& options_of,
                      const ::testing::Matcher<const absl::Status&>& matches) {
  EXPECT_THAT(RunRanks(2,
                       [&](Communicator& world) {
                         return FullyShard(MakeNet(kDim, 2), Unowned(world),
                                           options_of(world.rank()))
                             .status();
                       }),
              Each(matches));
}

void ExpectRefusedPolicy(const WrapPolicy& policy, const std::string& text) {
  ExpectNotSharded(
      [&](int) {
        Options options = BlockUnits();
        options.recompute.units = policy;
        return options;
      },
      StatusIs(Code::kInvalidArgument, HasSubstr(text)));
}

TEST(RecomputePolicyTest, HasToChooseUnits) {
  ExpectRefusedPolicy(At("blocks.1.fc"),
                      "recompute.units has chosen blocks.1.fc, of type "
                      "torch::nn::LinearImpl, which is no unit");
  ExpectRefusedPolicy(WrapModules<LinearImpl>(), "embed");
}

TEST(RecomputePolicyTest, HasToChooseSomething) {
  ExpectRefusedPolicy(None(), "none of the units blocks.0, blocks.1");
  ExpectRefusedPolicy(At("block.0"), "none of the units blocks.0, blocks.1");
  ExpectNotSharded(
      [](int) {
        Options options;
        options.recompute.units = EveryUnit();
        return options;
      },
      StatusIs(Code::kInvalidArgument, HasSubstr("none but the root")));
}

TEST(RecomputePolicyTest, HasToChooseAlikeOnAllRanks) {
  ExpectNotSharded(
      [](int rank) {
        Options options = BlockUnits();
        options.recompute.units = At(rank == 0 ? "blocks.0" : "blocks.1");
        return options;
      },
      StatusIs(Code::kInvalidArgument,
               AllOf(HasSubstr("blocks.0"), HasSubstr("recomputed"))));
}

// A module whose parameters all belong to another unit, too, is no unit.
class Tied : public torch::nn::Module {
 public:
  Tied()
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))) {
    ThrowIfError(Tie(a->weight, b->weight));
    ThrowIfError(Tie(a->bias, b->bias));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  Linear a, b;
};

TEST(RecomputePolicyTest, ChoosesNoUnitThatOwnsNothing) {
  Options options = UnitsOf<LinearImpl>();
  options.recompute.units = At("b");
  const auto shard = [&](Communicator& world) {
    return FullyShard(std::make_shared<Tied>(), Unowned(world), options)
        .status();
  };
  EXPECT_THAT(RunRanks(2, shard),
              Each(StatusIs(Code::kInvalidArgument,
                            HasSubstr("it owns no parameter"))));
}

TEST(RecomputePolicyTest, MayThrow) {
  ExpectNotSharded(
      [](int) {
        Options options = BlockUnits();
        options.recompute.units = [](const WrapCandidate&) -> bool {
          throw std::runtime_error("no such file");
        };
        return options;
      },
      StatusIs(Code::kUnknown, HasSubstr("no such file")));
}

// --- When it is called -------------------------------------------------------

struct Opaque {
  double factor;
};

// A unit, called in one of several ways.
enum class Calls {
  kGood,
  kOpaqueArgument,
  kNoResult,
  kWritesArgument,
  kOpaqueInSequential,
  kDirect,
};

class UnitImpl : public torch::nn::Module {
 public:
  UnitImpl() : fc(register_module("fc", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x, const Opaque& opaque) {
    return fc->forward(x) * opaque.factor;
  }
  Linear fc;
};

class SilentImpl : public torch::nn::Module {
 public:
  SilentImpl() : fc(register_module("fc", Linear(kDim, kDim))) {}
  void forward(at::Tensor* x) { *x = fc->forward(*x); }
  Linear fc;
};

class WritingImpl : public torch::nn::Module {
 public:
  WritingImpl() : fc(register_module("fc", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) { return fc->forward(x.mul_(2)); }
  Linear fc;
};

class Net : public torch::nn::Module {
 public:
  explicit Net(Calls calls)
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))),
        unit(register_module("unit", std::make_shared<UnitImpl>())),
        silent(register_module("silent", std::make_shared<SilentImpl>())),
        writing(register_module("writing", std::make_shared<WritingImpl>())),
        calls_(calls) {
    sequence->push_back(std::make_shared<UnitImpl>());
    register_module("sequence", sequence);
    testing::FillParameters(*this, 1);
  }

  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input * 2;
    switch (calls_) {
      case Calls::kGood:
        return Forward(block, x);
      case Calls::kOpaqueArgument:
        return Forward(unit, x, Opaque{2});
      case Calls::kNoResult:
        Forward(silent, &x);
        return x;
      case Calls::kWritesArgument:
        return Forward(writing, x);
      case Calls::kOpaqueInSequential:
        return sequence->forward(x, Opaque{2});
      case Calls::kDirect:
        return block->forward(x);
    }
    return x;
  }

  std::shared_ptr<BlockImpl> block;
  std::shared_ptr<UnitImpl> unit;
  std::shared_ptr<SilentImpl> silent;
  std::shared_ptr<WritingImpl> writing;
  torch::nn::Sequential sequence;

 private:
  const Calls calls_;
};

absl::Status Step(Communicator& world, Calls calls, bool transparent) {
  Options options = UnitsOf<BlockImpl, UnitImpl, SilentImpl, WritingImpl>();
  options.recompute.units = EveryUnit();
  options.transparent = transparent;
  options.abort_on_failure = false;  // all ranks fail alike
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(std::make_shared<Net>(calls),
                                               Unowned(world), options));
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(TorchToStatus("forward", [&] {
    loss = model->forward(Rows(int64_t{10} * world.rank(), 2, kDim)).sum();
  }));
  return model->Backward(loss);
}

void ExpectRefusedCall(Calls calls, bool transparent, const std::string& text) {
  EXPECT_THAT(RunRanks(2,
                       [&](Communicator& world) {
                         return Step(world, calls, transparent);
                       }),
              Each(StatusIs(Code::kFailedPrecondition, HasSubstr(text))));
}

TEST(RecomputedCallTest, HasToBeRepeatable) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) {
    return Step(world, Calls::kGood, /*transparent=*/false);
  }));
  for (const bool transparent : {false, true}) {
    ExpectRefusedCall(Calls::kOpaqueArgument, transparent,
                      "the forward of unit unit cannot be run again in "
                      "backward, as Options::recompute.units asks: it takes an "
                      "argument of a type in which no tensors are seen");
    ExpectRefusedCall(Calls::kNoResult, transparent, "it returns nothing");
    ExpectRefusedCall(Calls::kWritesArgument, transparent,
                      "the forward of the recomputed unit writing modified "
                      "tensor 0 in its arguments in place");
    ExpectRefusedCall(Calls::kOpaqueInSequential, transparent,
                      "the forward of unit sequence.0 cannot be run again");
  }
}

// A transparent model does not see where such a unit begins.
TEST(RecomputedCallTest, HasToBeSeenInATransparentModel) {
  ExpectRefusedCall(Calls::kDirect, /*transparent=*/true,
                    "unit block is to be run again in backward, as "
                    "Options::recompute.units asks, but its module was called "
                    "directly");
}

TEST(RecomputedCallTest, NeedsARetainedGraphForASecondBackward) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = UnitsOf<BlockImpl>();
    options.recompute.units = EveryUnit();
    options.abort_on_failure = false;
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<Net>(Calls::kGood),
                                     Unowned(world), options));
    const at::Tensor loss =
        model->forward(Rows(int64_t{10} * world.rank(), 2, kDim)).sum();
    EXPECT_OK(model->Backward(loss, /*retain_graph=*/true));
    EXPECT_OK(model->Backward(loss));
    EXPECT_THAT(
        model->Backward(loss),
        StatusIs(Code::kFailedPrecondition,
                 HasSubstr("a second backward through the recomputed "
                           "unit block, which the first has released")));
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
