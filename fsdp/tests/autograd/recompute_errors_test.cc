// Options::recompute.units refuses, on all ranks, choices that are no units and
// calls that cannot be repeated.
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/model/forward.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

WrapPolicy At(const std::string& path) {
  return
      [path](const WrapCandidate& candidate) { return candidate.path == path; };
}

struct Refusal {
  std::function<WrapPolicy(int rank)> policy;
  const char* text;
  bool has_units = true;
  Code code = Code::kInvalidArgument;
};

const Refusal kRefusals[] = {
    {[](int) { return At("blocks.1.fc"); },
     "recompute.units has chosen blocks.1.fc, of type torch::nn::LinearImpl, "
     "which is no unit"},
    {[](int) { return WrapModules<LinearImpl>(); }, "embed"},
    {[](int) -> WrapPolicy {
       return [](const WrapCandidate&) { return false; };
     },
     "none of the units blocks.0, blocks.1"},
    {[](int) { return At("block.0"); }, "none of the units blocks.0, blocks.1"},
    {[](int) { return EveryUnit(); }, "none but the root", /*has_units=*/false},
    {[](int rank) { return At(rank == 0 ? "blocks.0" : "blocks.1"); },
     "blocks.0.*recomputed"},
    {[](int) -> WrapPolicy {
       return [](const WrapCandidate&) -> bool {
         throw std::runtime_error("no such file");
       };
     },
     "no such file", /*has_units=*/true, Code::kUnknown},
};

TEST(RecomputePolicyTest, HasToChooseUnitsAlikeOnAllRanks) {
  for (const Refusal& refusal : kRefusals) {
    const auto shard = [&](Communicator& world) {
      Options options = refusal.has_units ? BlockUnits() : Options();
      options.recompute.units = refusal.policy(world.rank());
      return FullyShard(MakeNet(kDim, 2), Unowned(world), options).status();
    };
    EXPECT_THAT(
        RunRanks(2, shard),
        Each(StatusIs(refusal.code, ::testing::ContainsRegex(refusal.text))));
  }
}

// A module whose parameters all belong to another unit, too, is no unit.
class Tied : public torch::nn::Module {
 public:
  Tied() {
    ThrowIfError(Tie(a->weight, b->weight));
    ThrowIfError(Tie(a->bias, b->bias));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  Linear a = register_module("a", Linear(kDim, kDim));
  Linear b = register_module("b", Linear(kDim, kDim));
};

TEST(RecomputePolicyTest, ChoosesNoUnitThatOwnsNothing) {
  Options options = UnitsOf<LinearImpl>();
  options.recompute.units = At("b");
  const auto shard = [&](Communicator& world) {
    return FullyShard(std::make_shared<Tied>(), Unowned(world), options)
        .status();
  };
  EXPECT_THAT(RunRanks(2, shard),
              AllRefuse("it owns no parameter", Code::kInvalidArgument));
}

struct Opaque {
  double factor;
};

class UnitImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, const Opaque& opaque) {
    return fc->forward(x) * opaque.factor;
  }
  Linear fc = register_module("fc", Linear(kDim, kDim));
};

class SilentImpl : public torch::nn::Module {
 public:
  void forward(at::Tensor* x) { *x = fc->forward(*x); }
  Linear fc = register_module("fc", Linear(kDim, kDim));
};

class WritingImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return fc->forward(x.mul_(2)); }
  Linear fc = register_module("fc", Linear(kDim, kDim));
};

// A test gives its forward.
class Net : public torch::nn::Module {
 public:
  using Body = at::Tensor (*)(Net& net, at::Tensor x);
  explicit Net(Body body)
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))),
        unit(register_module("unit", std::make_shared<UnitImpl>())),
        silent(register_module("silent", std::make_shared<SilentImpl>())),
        writing(register_module("writing", std::make_shared<WritingImpl>())),
        body_(body) {
    sequence->push_back(std::make_shared<UnitImpl>());
    register_module("sequence", sequence);
    testing::FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return body_(*this, x * 2); }

  std::shared_ptr<BlockImpl> block;
  std::shared_ptr<UnitImpl> unit;
  std::shared_ptr<SilentImpl> silent;
  std::shared_ptr<WritingImpl> writing;
  torch::nn::Sequential sequence;

 private:
  const Body body_;
};

at::Tensor Good(Net& net, at::Tensor x) { return Forward(net.block, x); }

absl::StatusOr<FullyShardedDataParallel<Net>> ShardNet(Communicator& world,
                                                       Net::Body body,
                                                       bool transparent) {
  Options options =
      GoOn(UnitsOf<BlockImpl, UnitImpl, SilentImpl, WritingImpl>());
  options.recompute.units = EveryUnit();
  options.transparent = transparent;
  return FullyShard(std::make_shared<Net>(body), Unowned(world), options);
}

void ExpectRefusedCall(Net::Body body, bool transparent,
                       const std::string& text) {
  const auto step = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(world, body, transparent));
    at::Tensor loss;
    FSDP_RETURN_IF_ERROR(TorchToStatus("forward", [&] {
      loss = model->forward(Rows(int64_t{10} * world.rank(), 2, kDim)).sum();
    }));
    return model->Backward(loss);
  };
  EXPECT_THAT(RunRanks(2, step), AllRefuse(text));
}

TEST(RecomputedCallTest, HasToBeRepeatable) {
  const std::pair<Net::Body, const char*> calls[] = {
      {[](Net& net, at::Tensor x) { return Forward(net.unit, x, Opaque{2}); },
       "the forward of unit unit cannot be run again in backward, as "
       "Options::recompute.units asks: it takes an argument of a type in which "
       "no tensors are seen"},
      {[](Net& net, at::Tensor x) {
         Forward(net.silent, &x);
         return x;
       },
       "it returns nothing"},
      {[](Net& net, at::Tensor x) { return Forward(net.writing, x); },
       "the forward of the recomputed unit writing modified tensor 0 in its "
       "arguments in place"},
      {[](Net& net, at::Tensor x) {
         return net.sequence->forward(x, Opaque{2});
       },
       "the forward of unit sequence.0 cannot be run again"},
  };
  for (const auto& [body, text] : calls) {
    for (const bool transparent : {false, true}) {
      ExpectRefusedCall(body, transparent, text);
    }
  }
}

// A transparent model does not see where such a unit begins.
TEST(RecomputedCallTest, HasToBeSeenInATransparentModel) {
  const auto direct = [](Net& net, at::Tensor x) {
    return net.block->forward(x);
  };
  ExpectRefusedCall(direct, /*transparent=*/true,
                    "unit block is to be run again in backward, as "
                    "Options::recompute.units asks, but its module was called "
                    "directly");
}

TEST(RecomputedCallTest, NeedsARetainedGraphForASecondBackward) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          ShardNet(world, Good, /*transparent=*/false));
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
