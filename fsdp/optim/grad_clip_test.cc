#include <ATen/ATen.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>

#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/optim/shard_gradients.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/testing/sharded_test.h"
#include "ranges/tensor_range.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kOrders[] = {1, 2, 3.5, kInfinity};

// With one thread at::norm() adds the powers of other orders than 1 and 2 one
// by one in float32: 70001 of them are off by some 2e-5.
absl::Status CheckNorm(const at::Tensor& actual, double expected,
                       double tolerance = 1e-5) {
  const double error = std::abs(actual.item<double>() - expected);
  if (error <= tolerance * expected) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("norm ", actual.item<double>(), " not ", expected));
}

// A parameter's gradient before it is sharded over groups of
// world_size / replicas consecutive ranks.
struct Whole {
  std::string name;
  at::Tensor gradient;
  int replicas = 1;
};

at::Tensor Wave(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return (at::arange(numel, at::kDouble) * 0.37 + numel).sin().to(dtype);
}

// Returns this rank's shards; those of rank `without_gradients` have none.
std::vector<TensorRange> ShardsOf(const std::vector<Whole>& wholes,
                                  const Communicator& world,
                                  int without_gradients = -1) {
  std::vector<TensorRange> shards;
  for (const Whole& whole : wholes) {
    const int ranks = world.world_size() / whole.replicas;
    const int64_t numel = whole.gradient.numel();
    const int64_t size = (numel + ranks - 1) / ranks;
    const int64_t begin = std::min(numel, world.rank() % ranks * size);
    const int64_t end = std::min(numel, begin + size);
    TensorRange named{whole.name,
                      {numel},
                      {1},
                      begin,
                      at::empty(end - begin, whole.gradient.options())};
    named.replicas = whole.replicas;
    named.values.set_requires_grad(true);
    if (world.rank() != without_gradients) {
      named.values.mutable_grad() = whole.gradient.slice(0, begin, end).clone();
    }
    shards.push_back(std::move(named));
  }
  return shards;
}

double NormOf(const std::vector<Whole>& wholes, double p) {
  std::vector<at::Tensor> all;
  all.reserve(wholes.size());
  for (const Whole& whole : wholes) {
    all.push_back(whole.gradient.to(at::kDouble));
  }
  return at::cat(all).norm(p).item<double>();
}

// Clips to half of the norm and compares norm and gradients with `wholes`.
absl::Status ClipToHalf(Communicator& world, const std::vector<Whole>& wholes,
                        double p) {
  const double norm = NormOf(wholes, p);
  const std::vector<TensorRange> shards = ShardsOf(wholes, world);
  const ClipGradNormOptions options = {norm / 2, p};
  FSDP_ASSIGN_OR_RETURN(const at::Tensor actual,
                        ClipGradNorm(world, shards, options));
  FSDP_RETURN_IF_ERROR(CheckNorm(actual, norm, p == 3.5 ? 1e-4 : 1e-5));
  for (size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor& clipped = shards[i].values.grad();
    const at::Tensor expected =
        (wholes[i].gradient.to(at::kDouble) / 2)
            .to(wholes[i].gradient.scalar_type())
            .slice(0, shards[i].begin, shards[i].begin + clipped.numel());
    // The tolerance is one rounding of the narrowest dtype.
    if (clipped.scalar_type() != expected.scalar_type() ||
        !at::allclose(clipped, expected, 8e-3, 1e-6)) {
      return absl::InternalError(absl::StrCat(shards[i].name, " differs"));
    }
  }
  return absl::OkStatus();
}

TEST(ClipGradNormTest, EveryDtypeIsSummedInFloat32AtLeast) {
  // A sum of 70001 squares in bfloat16 would be far off.
  std::vector<Whole> wholes = {{"empty", at::empty({0})},
                               {"one", Wave(1)},
                               {"single", Wave(1031)},
                               {"bf16", Wave(70001, at::kBFloat16)},
                               {"half", Wave(257, at::kHalf)}};
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    wholes.push_back({"last", Wave(131, dtype)});
    for (const int world_size : {1, 2, 3, 5}) {
      for (const double p : kOrders) {
        EXPECT_OK(RunAllRanks(
            world_size,
            [&](Communicator& world) { return ClipToHalf(world, wholes, p); }))
            << world_size << " ranks, p " << p;
      }
    }
  }
}

TEST(ClipGradNormTest, TheNormIsFloat64WhereAShardIs) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      // Two ranks have nothing of the one element.
      const std::vector<TensorRange> shards =
          ShardsOf({{"a", Wave(5)}, {"b", Wave(1, dtype)}}, world);
      FSDP_ASSIGN_OR_RETURN(const auto norm, ClipGradNorm(world, shards, {}));
      const at::ScalarType expected =
          dtype == at::kDouble ? at::kDouble : at::kFloat;
      FSDP_RETURN_IF_ERROR(CheckThat(norm.dim(), 0, "dimensions of the norm"));
      return CheckThat(norm.scalar_type(), expected, "dtype of the norm");
    }));
  }
}

TEST(ClipGradNormTest, RangesThatSeveralRanksHoldCountOnce) {
  const std::vector<Whole> wholes = {{"sharded", Wave(13)},
                                     {"hybrid", Wave(31, at::kBFloat16), 2},
                                     {"also hybrid", Wave(7), 2},
                                     {"replicated", Wave(11), 4}};
  for (const double p : kOrders) {
    EXPECT_OK(RunAllRanks(
        4, [&](Communicator& world) { return ClipToHalf(world, wholes, p); }));
  }
}

TEST(ClipGradNormTest, RanksWithoutAnyGradientTakePart) {
  const std::vector<Whole> wholes = {{"a", Wave(6)}, {"b", Wave(9)}};
  for (const double p : kOrders) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      const std::vector<TensorRange> shards =
          ShardsOf(wholes, world, /*without_gradients=*/1);
      const ClipGradNormOptions options = {1, p};
      FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                            ClipGradNorm(world, shards, options));
      const at::Tensor rest =
          at::cat({Wave(6).slice(0, 0, 2), Wave(6).slice(0, 4, 6),
                   Wave(9).slice(0, 0, 3), Wave(9).slice(0, 6, 9)});
      return CheckNorm(norm, rest.norm(p).item<double>());
    }));
  }
}

TEST(ClipGradNormTest, NoGradientOnAnyRankIsANormOfZero) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    const std::vector<TensorRange> none;
    const std::vector<TensorRange> undefined =
        ShardsOf({{"a", Wave(4)}}, world, world.rank());
    for (const double p : kOrders) {
      const ClipGradNormOptions options = {1, p};
      for (const auto* shards : {&none, &undefined}) {
        FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                              ClipGradNorm(world, *shards, options));
        FSDP_RETURN_IF_ERROR(CheckThat(norm.item<double>(), 0, "norm"));
      }
    }
    return absl::OkStatus();
  }));
}

TEST(ClipGradNormTest, ANormBelowTheBoundOrWithoutOneChangesNothing) {
  for (const double max_norm : {100.0, kInfinity}) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      const std::vector<TensorRange> shards = ShardsOf({{"a", Wave(9)}}, world);
      const at::Tensor before = shards[0].values.grad().clone();
      const ClipGradNormOptions options = {max_norm};
      FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                            ClipGradNorm(world, shards, options));
      FSDP_RETURN_IF_ERROR(CheckNorm(norm, NormOf({{"a", Wave(9)}}, 2)));
      return CheckTensor(shards[0].values.grad(), before, "gradient");
    }));
  }
}

TEST(ClipGradNormTest, SquaresThatFloat32DoesNotHoldAreNoInfinity) {
  // Each parameter's norm fits into float32, the square of the whole does not.
  const std::vector<Whole> wholes = {{"a", Wave(3) * 1e19},
                                     {"b", Wave(5) * 1e19}};
  EXPECT_OK(RunAllRanks(
      2, [&](Communicator& world) { return ClipToHalf(world, wholes, 2); }));
}

// A maximum of NCCL is C's fmax(), which passes over a NaN.
class MaximumOfNumbers final : public comm::ForwardingCommunicator {
 public:
  explicit MaximumOfNumbers(Communicator& base)
      : ForwardingCommunicator(Unowned(base)) {}

 private:
  comm::StartedWork DoCollective(const comm::CollectiveArgs& args,
                                 absl::string_view label) override {
    if (args.op == comm::ReduceOp::kMax && args.out.is_floating_point()) {
      args.out.masked_fill_(args.out.isnan(), -kInfinity);
    }
    return ForwardingCommunicator::DoCollective(args, label);
  }
};

TEST(ClipGradNormTest, ANormThatIsNotFiniteIsRefusedOrPassedOn) {
  for (const double bad : {kInfinity, kNan}) {
    for (const double p : kOrders) {
      std::vector<Whole> wholes = {{"fine", Wave(7)}, {"broken", Wave(9)}};
      wholes[1].gradient[8] = bad;  // the last rank's
      const ClipGradNormOptions options = {1, p, true};
      const std::vector<absl::Status> results =
          RunRefusedRanks(3, [&](Communicator& base) -> absl::Status {
            MaximumOfNumbers world(base);
            const std::vector<TensorRange> shards = ShardsOf(wholes, world);
            absl::Status refused =
                ClipGradNorm(world, shards, options).status();
            FSDP_RETURN_IF_ERROR(
                CheckTensor(shards[0].values.grad(),
                            ShardsOf(wholes, world)[0].values.grad(),
                            "gradient after a refusal"));
            FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                                  ClipGradNorm(world, shards, {1, p}));
            FSDP_RETURN_IF_ERROR(CheckThat(
                norm.item<double>(),
                std::isnan(bad)
                    ? ::testing::Matcher<double>(::testing::IsNan())
                    : ::testing::Truly([](double x) { return std::isinf(x); }),
                "norm"));
            return refused;
          });
      EXPECT_THAT(
          results,
          Each(StatusIs(
              Code::kFailedPrecondition,
              AllOf(HasSubstr("clipping gradients"), HasSubstr("the norm is "),
                    // Rank 1 has no part of it.
                    HasSubstr("the gradient of broken is the first one")))));
    }
  }
}

// Clips some shards on two ranks and returns what each has sent.
std::vector<std::vector<std::string>> TracesOfClipping(
    double max_norm, double p, std::vector<absl::Status>* results) {
  RecordedRanks ranks(2);
  const ClipGradNormOptions options = {max_norm, p};
  *results = RunRanks(ranks.group, [&](Communicator& world) {
    const std::vector<Whole> wholes = {
        {"a", Wave(9)}, {"b", Wave(9, at::kBFloat16)}, {"c", Wave(9), 2}};
    return ClipGradNorm(world, ShardsOf(wholes, world), options).status();
  });
  std::vector<std::vector<std::string>> traces(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (const comm::CollectiveRecord& record : ranks.logs[rank].Trace()) {
      traces[rank].push_back(ToString(record));
    }
  }
  return traces;
}

TEST(ClipGradNormTest, TakesOneAllReduce) {
  std::vector<absl::Status> results;
  EXPECT_THAT(
      TracesOfClipping(0.5, 2, &results),
      Each(ElementsAre("all-reduce of clipping gradients to a 2-norm of 0.5, "
                       "8 bytes")));
  EXPECT_OK(AllOk(results));
}

TEST(ClipGradNormTest, SendsNothingAfterABadArgument) {
  for (const auto& [max_norm, p] : std::vector<std::pair<double, double>>{
           {0, 2}, {-1, 2}, {kNan, 2}, {1, 0}, {1, -1}, {1, kNan}}) {
    std::vector<absl::Status> results;
    EXPECT_THAT(TracesOfClipping(max_norm, p, &results), Each(IsEmpty()));
    EXPECT_THAT(results, AllRefuse("must be positive", Code::kInvalidArgument));
  }
}

// Returns a shard with this gradient, which may be undefined.
TensorRange ShardWith(const at::Tensor& gradient, int replicas = 1) {
  const int64_t numel = gradient.defined() ? gradient.numel() : 4;
  TensorRange named{"p", {numel}, {1}, 0, at::zeros({numel})};
  named.replicas = replicas;
  if (gradient.defined()) named.values = at::zeros_like(gradient);
  named.values.set_requires_grad(true);
  named.values.mutable_grad() = gradient;
  return named;
}

std::vector<int64_t> Sizes(const GradientGroup& group) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& gradient : group.gradients) {
    sizes.push_back(gradient.numel());
  }
  return sizes;
}

TEST(GroupGradientsTest, NeighboursInMemoryAreOne) {
  const at::Tensor flat = at::arange(100, at::kFloat);
  const auto part = [&](int64_t begin, int64_t numel) {
    return ShardWith(flat.narrow(0, begin, numel));
  };
  // The shards: without a gradient, empty, behind a gap, before the previous
  // one, and in other memory.
  const std::vector<TensorRange> shards = {
      part(0, 8),    part(8, 4),
      ShardWith({}), part(12, 4),
      part(16, 0),   part(16, 2),
      part(20, 4),   part(24, 6),
      part(10, 2),   ShardWith(at::ones({3})),
      part(12, 1)};
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_THAT(Sizes(groups[0]), ElementsAre(18, 10, 2, 3, 1));
  EXPECT_EQ(groups[0].each.size(), 9u);
  EXPECT_TRUE(groups[0].gradients[0].equal(flat.narrow(0, 0, 18)));
  EXPECT_TRUE(groups[0].gradients[1].equal(flat.narrow(0, 20, 10)));
}

TEST(GroupGradientsTest, OnlyContiguousOnesOfOneKindAreMerged) {
  const at::Tensor flat = at::arange(64, at::kFloat);
  const at::Tensor other = at::arange(64, at::kDouble);
  const std::vector<TensorRange> shards = {
      ShardWith(flat.narrow(0, 0, 4)), ShardWith(other.narrow(0, 0, 4)),
      ShardWith(flat.narrow(0, 4, 4), /*replicas=*/2),
      ShardWith(flat.narrow(0, 8, 8).view({4, 2}).t()),
      ShardWith(other.narrow(0, 4, 4))};
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  std::vector<std::string> kinds;
  for (const GradientGroup& group : groups) {
    for (const int64_t size : Sizes(group)) {
      kinds.push_back(absl::StrCat(c10::toString(group.dtype), " ",
                                   group.replicas, " ", size));
    }
  }
  EXPECT_THAT(kinds, ::testing::UnorderedElementsAre(
                         "Float 1 4", "Float 1 8", "Float 2 4", "Double 1 8"));
}

TEST(GroupGradientsTest, ARunEndsBeforeAFloatCannotAddItUp) {
  constexpr int64_t kHalf = int64_t{1} << 23;
  const at::Tensor flat = at::empty({3 * kHalf});
  const std::vector<TensorRange> shards = {
      ShardWith(flat.narrow(0, 0, kHalf)),
      ShardWith(flat.narrow(0, kHalf, kHalf)),
      ShardWith(flat.narrow(0, 2 * kHalf, kHalf))};
  EXPECT_THAT(Sizes(GroupGradients(shards)[0]), ElementsAre(2 * kHalf, kHalf));
}

// Ranks have different gradients in one piece of memory with gaps, which must
// be ignored.
TEST(GroupGradientsTest, ClippingSeesAndScalesEachElementOnce) {
  constexpr int64_t kSizes[] = {7, 1, 12, 4};
  const auto flat_of = [](int rank) {
    return (at::arange(30, at::kFloat) * 0.7 + rank).sin();
  };
  for (const double p : kOrders) {
    double expected = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const double norm =
          flat_of(rank).narrow(0, 2, 24).to(at::kDouble).norm(p).item<double>();
      expected = std::isinf(p) ? std::max(expected, norm)
                               : expected + std::pow(norm, p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      const at::Tensor flat = flat_of(world.rank());
      std::vector<TensorRange> shards;
      int64_t begin = 2;
      for (const int64_t size : kSizes) {
        shards.push_back(ShardWith(flat.narrow(0, begin, size)));
        begin += size;
      }
      const auto version = shards[1].values.grad()._version();
      const ClipGradNormOptions options = {expected / 2, p};
      const auto norm = ClipGradNorm(world, shards, options);
      if (!norm.ok()) return norm.status();
      FSDP_RETURN_IF_ERROR(
          CheckThat(norm->item<double>(),
                    ::testing::DoubleNear(expected, 1e-5 * expected), "norm"));
      at::Tensor clipped = flat_of(world.rank());
      clipped.narrow(0, 2, 24).mul_(0.5);
      FSDP_RETURN_IF_ERROR(
          CheckTensor(flat, clipped, 1e-5, 1e-7, "clipped gradients"));
      return CheckThat(shards[1].values.grad()._version(), Gt(version),
                       "count of writes");
    }));
  }
}

}  // namespace
}  // namespace fsdp::testing
