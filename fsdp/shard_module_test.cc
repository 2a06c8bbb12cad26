// Sharding refuses with a clear error, the same on every rank, and changes
// nothing.
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include "base/testing/warnings.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;
constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& world, const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), options);
}

// Expects every rank to get the same refusal from `shard`.
void ExpectRefusedBy(const std::function<absl::Status(Communicator&)>& shard,
                     Code code, const std::string& text) {
  EXPECT_THAT(RunRanks(3, shard), Each(StatusIs(code, HasSubstr(text))));
}

template <typename Net>
void ExpectRefused(const std::function<std::shared_ptr<Net>()>& make_net,
                   Code code, const std::string& text) {
  ExpectRefusedBy(
      [&](Communicator& world) {
        return FullyShard(make_net(), Unowned(world)).status();
      },
      code, text);
}

class OneParameter : public torch::nn::Module {
 public:
  explicit OneParameter(const at::Tensor& value)
      : p(register_parameter("p", value, value.is_floating_point())) {}
  at::Tensor forward(const at::Tensor& x) { return x * p; }
  at::Tensor p;
};

TEST(ShardModuleTest, RefusesAParameterWithoutDenseMemory) {
  ExpectRefused<OneParameter>(
      [] { return std::make_shared<OneParameter>(at::ones({3}).to_sparse()); },
      Code::kInvalidArgument, "parameter p has no dense memory");
  ExpectRefused<OneParameter>(
      [] {
        return std::make_shared<OneParameter>(
            at::ones({3}, at::TensorOptions(at::kMeta)));
      },
      Code::kInvalidArgument, "on the meta device");
}

class Overlapping : public torch::nn::Module {
 public:
  Overlapping() {
    const at::Tensor base = at::ones({6});
    register_parameter("left", base.narrow(0, 0, 4));
    register_parameter("right", base.narrow(0, 2, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(ShardModuleTest, RefusesParametersThatOverlapInPart) {
  ExpectRefused<Overlapping>(std::make_shared<Overlapping>,
                             Code::kInvalidArgument,
                             "parameters left and right");
}

TEST(ShardModuleTest, RefusesAParameterThatBelongsToAUnitAlready) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(world));
    // The module again, and the wrapper.
    FSDP_RETURN_IF_ERROR(
        CheckRefused(FullyShard(model.module(), Unowned(world)).status(),
                     "already belongs to a unit"));
    return CheckRefused(FullyShard(model.ptr(), Unowned(world)).status(),
                        "already belongs to a unit");
  }));
}

TEST(ShardModuleTest, RefusesParametersThatAnOptimizerHolds) {
  ExpectRefusedBy(
      [](Communicator& world) {
        auto net = MakeNet(kDim, 2);
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        return FullyShard(net, Unowned(world)).status();
      },
      Code::kFailedPrecondition, "make it after sharding");
}

TEST(ShardModuleTest, RefusesInferenceMode) {
  ExpectRefusedBy(
      [](Communicator& world) {
        c10::InferenceMode inference;
        return ShardNet(world).status();
      },
      Code::kFailedPrecondition, "inference mode");
}

TEST(ShardModuleTest, RefusesModelsThatDifferBetweenRanks) {
  const std::vector<absl::Status> statuses =
      RunRanks(3, [](Communicator& world) {
        return FullyShard(MakeNet(kDim + world.rank() / 2, 2), Unowned(world))
            .status();
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kInvalidArgument,
                            AllOf(HasSubstr("rank 2"), HasSubstr("[5, 5]"),
                                  HasSubstr("[6, 6]")))));
}

TEST(ShardModuleTest, RefusesOnAllRanksWhatOneRankRefuses) {
  ExpectRefusedBy(
      [](Communicator& world) {
        auto net = std::make_shared<OneParameter>(
            at::ones({3}, world.rank() == 1 ? at::kInt : at::kFloat));
        return FullyShard(net, Unowned(world)).status();
      },
      Code::kInvalidArgument, "rank 1: parameter p has dtype Int");
}

// Returns rank 0's warnings when `make_net()` is sharded; rank 1 must have
// none.
std::string Told(const std::function<std::shared_ptr<NetImpl>()>& make_net,
                 const Options& options) {
  std::vector<std::string> texts(kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) {
    testing::Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    absl::Status status =
        FullyShard(make_net(), Unowned(world), options).status();
    texts[world.rank()] = warnings.text();
    return status;
  }));
  EXPECT_EQ(texts[1], "");
  return texts[0];
}

TEST(ShardModuleTest, SaysThatAPolicyHasChosenNothing) {
  const auto make_net = [] { return MakeNet(kDim, 2); };
  Options none;
  none.wrap_policy = WrapLargerThan(1'000'000);
  EXPECT_THAT(Told(make_net, none), HasSubstr("has chosen no module"));
  EXPECT_EQ(Told(make_net, BlockUnits()), "");
  EXPECT_EQ(Told(make_net, Options()), "");
}

TEST(ShardModuleTest, SaysThatUpdatesOfHalvesVanish) {
  // The warning is right: 100 steps of 1e-5 at 1 leave 1.
  at::Tensor weight = at::ones({1}, at::kBFloat16);
  for (int step = 0; step < 100; ++step) weight.sub_(1e-5);
  ASSERT_EQ(weight.item<float>(), 1);
  const auto in_bf16 = [](bool trained) {
    return [trained] {
      auto net = MakeNet(kDim, 2);
      net->to(at::kBFloat16);
      for (at::Tensor& parameter : net->parameters()) {
        parameter.set_requires_grad(trained);
      }
      return net;
    };
  };
  EXPECT_THAT(Told(in_bf16(true), BlockUnits()),
              AllOf(HasSubstr("is trained in BFloat16"),
                    HasSubstr("fsdp::ComputeIn()")));
  EXPECT_EQ(Told(in_bf16(false), BlockUnits()), "");
  Options computes = BlockUnits();
  computes.unit.precision = ComputeIn(at::kBFloat16);
  EXPECT_EQ(Told([] { return MakeNet(kDim, 2); }, computes), "");
}

TEST(TieTest, RefusesWhatDiffersOrIsInUse) {
  const Linear a(2, 3);
  const Linear b(3, 2);
  const Linear c(2, 3);
  EXPECT_THAT(Tie(a->weight, b->weight),
              StatusIs(Code::kInvalidArgument,
                       HasSubstr("Float [3, 2] on cpu and Float [2, 3]")));
  EXPECT_THAT(Tie(a->weight, at::Tensor()),
              StatusIs(Code::kInvalidArgument, HasSubstr("undefined")));
  c->weight.mutable_grad() = at::ones({3, 2});
  EXPECT_THAT(
      Tie(a->weight, c->weight),
      StatusIs(Code::kFailedPrecondition, HasSubstr("before training")));
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Linear sharded(2, 3);
    FSDP_RETURN_IF_ERROR(FullyShard(sharded, Unowned(world)).status());
    const Linear other(2, 3);
    return CheckRefused(Tie(sharded->weight, other->weight), "");
  }));
}

}  // namespace
}  // namespace fsdp::testing
