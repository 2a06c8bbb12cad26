// Units on groups of their own (replicated, not sharded, gathered from a part),
// gradients kept whole, reductions by hooks, and steps.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::Precision;

constexpr absl::Duration kTimeout = absl::Seconds(20);
constexpr int64_t kNumel = 11;
constexpr int kUnit = 0;

at::Tensor Values() { return at::arange(kNumel, at::kFloat); }

// One unit with one parameter.
class OneUnit {
 public:
  OneUnit(Communicator& world, Placement placement,
          at::ScalarType compute_dtype = at::kFloat)
      : parameter_(Values().set_requires_grad(true)) {
    std::vector<RuntimeUnit> units;
    units.push_back(
        UnitOf(parameter_, std::move(placement), world, compute_dtype));
    runtime_ =
        std::make_unique<Runtime>(Unowned(world), std::move(units), kTimeout);
  }

  Runtime& runtime() { return *runtime_; }
  const at::Tensor& parameter() const { return parameter_; }
  const FlatParameter& flat() const { return *runtime_->flats(kUnit)[0]; }
  at::Tensor gradient() const { return flat().ShardSlice(0).grad(); }

  // Executes the actions; gradients are full of `value`.
  absl::Status Do(const std::vector<ActionKind>& kinds,
                  std::optional<double> value = std::nullopt) {
    Actions actions;
    for (const ActionKind kind : kinds) actions.push_back({kind, kUnit});
    std::vector<at::Tensor> gradients;
    if (value.has_value()) gradients.push_back(at::full({kNumel}, *value));
    return runtime_->Execute(actions, gradients);
  }

  absl::Status CheckGradient(double expected) const {
    const at::Tensor actual = gradient();
    if (!actual.defined()) return absl::InternalError("no gradient");
    return Check(at::equal(actual, at::full_like(actual, expected)),
                 absl::StrCat("the gradient is not ", expected));
  }

  absl::Status CheckNothingInUse() const {
    const MemoryStats stats = runtime_->memory_stats();
    return Check(
        stats.parameters.in_use_bytes == 0 && stats.gradients.in_use_bytes == 0,
        "memory is in use");
  }

 private:
  const at::Tensor parameter_;
  std::unique_ptr<Runtime> runtime_;
};

Placement Sharded(Communicator& world) { return {Unowned(world), {}, {}}; }

constexpr auto kGather = ActionKind::kGather;
constexpr auto kWaitGather = ActionKind::kWaitGather;
constexpr auto kFree = ActionKind::kFree;
constexpr auto kFill = ActionKind::kFillReduceBuffer;
constexpr auto kReduce = ActionKind::kReduce;
constexpr auto kReplicate = ActionKind::kReplicate;
constexpr auto kWaitReduce = ActionKind::kWaitReduce;
constexpr auto kAccumulate = ActionKind::kAccumulate;

TEST(WholeGradientsTest, AreAddedUpAndReducedWithTheLastOnes) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world));
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(unit.Do({kAccumulate}, mine));
    FSDP_RETURN_IF_ERROR(unit.Do({kAccumulate}, 10 * mine));
    EXPECT_EQ(unit.runtime().memory_stats().gradients.in_use_bytes,
              unit.runtime().reducer().reduce_buffer_bytes(kUnit));
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce, kWaitReduce}, 100 * mine));
    FSDP_RETURN_IF_ERROR(unit.CheckGradient(222));
    return unit.CheckNothingInUse();
  }));
}

TEST(WholeGradientsTest, AreReducedAloneWhereNoneCameLast) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world));
    FSDP_RETURN_IF_ERROR(unit.Do({kAccumulate}, 2 * world.rank() + 1));
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce, kWaitReduce}));
    return unit.CheckGradient(2);
  }));
}

TEST(WholeGradientsTest, OutliveWhatElseIsDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world));
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
    FSDP_RETURN_IF_ERROR(unit.Do({kAccumulate}, 1));
    unit.runtime().DropEverything();
    EXPECT_TRUE(unit.runtime().reducer().HasWholeGradients(kUnit));
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce, kWaitReduce}, 5));
    FSDP_RETURN_IF_ERROR(unit.CheckGradient(6));
    FSDP_RETURN_IF_ERROR(unit.Do({kAccumulate}, 1));
    unit.runtime().reducer().DropWholeGradients();
    EXPECT_FALSE(unit.runtime().reducer().HasWholeGradients(kUnit));
    return unit.CheckNothingInUse();
  }));
}

TEST(PartTest, ASmallerGroupGathersFromItWhateverBecomesOfTheShards) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    Placement placement = Sharded(world);
    FSDP_ASSIGN_OR_RETURN(placement.part,
                          comm::SplitConsecutive(placement.shard, 2));
    OneUnit unit(world, placement);
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather, ActionKind::kShrink}));
    FSDP_RETURN_IF_ERROR(unit.CheckNothingInUse());
    at::Tensor shard = unit.flat().shard();
    shard.add_(1);
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
    EXPECT_TRUE(at::equal(unit.parameter(), Values()));
    FSDP_RETURN_IF_ERROR(unit.Do({kFree, ActionKind::kDropPart}));
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
    EXPECT_TRUE(at::equal(unit.parameter(), Values() + 1));
    return unit.Do({kFree});
  }));
}

TEST(ReplicateTest, MeansOverRowsAndColumnsOfTheMesh) {
  EXPECT_OK(RunAllRanks(6, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 3}}));
    OneUnit unit(world, {mesh.group(1), mesh.group(0), nullptr});
    FSDP_RETURN_IF_ERROR(
        unit.Do({kFill, kReduce, kReplicate, kWaitReduce}, world.rank() + 1));
    FSDP_RETURN_IF_ERROR(unit.CheckGradient(3.5));
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
    return Check(at::equal(unit.parameter(), Values()), "the row's shards");
  }));
}

TEST(ReplicateTest, TwoReductionsOfAUnitAreReplicatedInTurn) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    OneUnit unit(world, {mesh.group(1), mesh.group(0), nullptr});
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce}, 1));
    FSDP_RETURN_IF_ERROR(unit.Do({kReplicate, kFill, kReduce}, 10));
    FSDP_RETURN_IF_ERROR(unit.Do({kWaitReduce, kReplicate, kWaitReduce}));
    return unit.CheckGradient(11);
  }));
}

// In a group of one rank, the shard is the whole parameter.
TEST(NotShardedTest, ComputesInTheShardItselfUnlessTheDtypeDiffers) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> alone,
                          comm::SplitConsecutive(Unowned(world), 1));
    OneUnit unit(world, {alone, Unowned(world), nullptr});
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
    FSDP_RETURN_IF_ERROR(unit.CheckNothingInUse());
    EXPECT_EQ(unit.parameter().data_ptr(), unit.flat().shard().data_ptr());
    FSDP_RETURN_IF_ERROR(unit.Do({kFree}));
    FSDP_RETURN_IF_ERROR(
        unit.Do({kFill, kReduce, kReplicate, kWaitReduce}, world.rank()));
    FSDP_RETURN_IF_ERROR(
        unit.Do({kFill, kReduce, kReplicate, kWaitReduce}, world.rank() + 1));
    FSDP_RETURN_IF_ERROR(unit.CheckGradient(3));

    OneUnit low(world, {alone, Unowned(world), nullptr}, at::kBFloat16);
    FSDP_RETURN_IF_ERROR(low.Do({kGather, kWaitGather}));
    EXPECT_EQ(low.parameter().scalar_type(), at::kBFloat16);
    return low.Do({kFree});
  }));
}

TEST(PrecisionTest, OfTheNextGatherIsTheOneThatIsSet) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world), at::kBFloat16);
    const auto gathered = [&](at::ScalarType dtype) -> absl::Status {
      FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather}));
      EXPECT_EQ(unit.parameter().scalar_type(), dtype);
      EXPECT_TRUE(at::equal(unit.parameter(), Values().to(dtype)));
      return unit.Do({kFree});
    };
    FSDP_RETURN_IF_ERROR(gathered(at::kBFloat16));
    unit.runtime().SetPrecision(kUnit, Precision::kFull);
    FSDP_RETURN_IF_ERROR(gathered(at::kFloat));
    unit.runtime().SetPrecision(kUnit, Precision::kCompute);
    return gathered(at::kBFloat16);
  }));
}

TEST(RuntimeHooksTest, ReductionsAreCalledWithOwnAsThisRanksPartOfTheWhole) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    OneUnit unit(world, {mesh.group(1), mesh.group(0), nullptr});
    std::string calls;
    RuntimeHooks hooks;
    hooks.reduce_scatter = [&](const ReduceScatterCall& call)
        -> absl::StatusOr<std::unique_ptr<comm::Work>> {
      const int64_t own = call.own.numel();
      const bool is_part =
          call.whole.numel() == 2 * own &&
          call.whole.narrow(0, call.group.rank() * own, own).data_ptr() ==
              call.own.data_ptr();
      absl::StrAppend(&calls, is_part ? "scatter " : "? ", call.unit, "; ");
      return call.group.ReduceScatter(call.own, call.whole,
                                      comm::ReduceOp::kSum, call.unit);
    };
    hooks.all_reduce = [&](const AllReduceCall& call)
        -> absl::StatusOr<std::unique_ptr<comm::Work>> {
      absl::StrAppend(&calls, "reduce ", call.unit, "; ");
      return call.group.AllReduce(call.own, comm::ReduceOp::kSum, call.unit);
    };
    unit.runtime().reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(
        unit.Do({kFill, kReduce, kReplicate, kWaitReduce}, world.rank()));
    EXPECT_EQ(calls, "scatter unit; reduce unit; ");
    return unit.CheckGradient(1.5);
  }));
}

TEST(RuntimeHooksTest, AStepSeesTheGradientAndItsErrorIsReturned) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world));
    RuntimeHooks hooks;
    absl::Status result;
    absl::Status seen = absl::UnknownError("not called");
    hooks.step = [&](int index) {
      seen = Check(index == kUnit, "another unit");
      if (seen.ok()) seen = unit.CheckGradient(3);
      return result;
    };
    unit.runtime().reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(
        unit.Do({kFill, kReduce, kWaitReduce, ActionKind::kStep}, 3));
    FSDP_RETURN_IF_ERROR(seen);
    result = absl::DataLossError("nan");
    const absl::Status failed = unit.Do({ActionKind::kStep});
    return Check(absl::IsDataLoss(failed), failed.ToString());
  }));
}

TEST(OrderTest, TellsOrdersApartByTextAndHashUntilItIsCleared) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    OneUnit unit(world, Sharded(world));
    Runtime& runtime = unit.runtime();
    const uint64_t none = runtime.order().hash();
    EXPECT_TRUE(runtime.order().ToString().empty());
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather, kFree}));
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce, kWaitReduce}, 1));
    const uint64_t gather_first = runtime.order().hash();
    EXPECT_EQ(runtime.order().ToString(),
              absl::StrCat("all-gather unit, ", unit.flat().unsharded_bytes(),
                           " bytes Float\nreduce-scatter unit, ",
                           runtime.reducer().reduce_buffer_bytes(kUnit),
                           " bytes Float\n"));
    runtime.order().Clear();
    EXPECT_EQ(runtime.order().hash(), none);
    FSDP_RETURN_IF_ERROR(unit.Do({kFill, kReduce, kWaitReduce}, 1));
    FSDP_RETURN_IF_ERROR(unit.Do({kGather, kWaitGather, kFree}));
    return Check(runtime.order().hash() != gather_first, "equal hashes");
  }));
}

}  // namespace
}  // namespace fsdp::testing
