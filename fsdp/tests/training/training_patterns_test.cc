// Steps with late ranks, gathers by the user or the user's extension, different
// orders, and their memory.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/optim/sgd.h>

#include <set>

#include "comm/quantized/quantization_log.h"
#include "comm/testing/failing_communicator.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::Progress;
using ::fsdp::comm::testing::StartLast;

constexpr int kBlocks = 3;
constexpr int kRanks = 3;

at::Tensor PartLoss(const TensorFunction& forward, int64_t part) {
  const at::Tensor x = Rows(part * 3, 3, kDim);
  return Loss(forward(x), x);
}

TrainingTask TenStepsOfAdam() {
  TrainingTask task;
  task.loss = PartLoss;
  task.optimizer = AdamW();
  task.steps = 10;
  return task;
}

absl::StatusOr<TaskRecord> TrainNet(Communicator& world,
                                    const TrainingTask& task) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks),
                                               Unowned(world), BlockUnits()));
  return RunSharded(task, model);
}

// --- Late ranks --------------------------------------------------------------

enum class LateAt { kGather, kReduce, kAfterForward, kBeforeStep };

class LateRankTest : public ::testing::TestWithParam<std::tuple<LateAt, int>> {
 protected:
  static LateAt place() { return std::get<0>(GetParam()); }
  static int late_rank() { return std::get<1>(GetParam()); }

  static std::set<Collective> LateCollectives() {
    if (place() == LateAt::kGather) return {Collective::kAllGather};
    if (place() == LateAt::kReduce) return {Collective::kReduceScatter};
    return {};
  }

  // The late rank continues once its peers have reached their next collective.
  static TrainingTask Delayed(Progress& progress, int rank) {
    TrainingTask task = TenStepsOfAdam();
    if (rank != late_rank()) return task;
    const auto wait = [&progress, rank] {
      ThrowIfError(progress.AwaitPeers(rank, absl::Now() + absl::Seconds(30)));
    };
    if (place() == LateAt::kAfterForward) {
      task.loss = [wait](const TensorFunction& forward, int64_t part) {
        at::Tensor loss = PartLoss(forward, part);
        wait();
        return loss;
      };
    } else if (place() == LateAt::kBeforeStep) {
      task.before_step = [wait](const auto&) { wait(); };
    }
    return task;
  }
};

TEST_P(LateRankTest, ChangesNoBitOfTenStepsOfAdam) {
  TaskRecord expected;
  ASSERT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(TaskRecord mine, TrainNet(world, TenStepsOfAdam()));
    if (world.rank() == 0) expected = std::move(mine);
    return absl::OkStatus();
  }));
  ASSERT_OK(CheckSameRecord(
      expected, RunPlain(TenStepsOfAdam(), MakeNet(kDim, kBlocks), kRanks),
      1e-5));

  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(kRanks));
  Progress progress(kRanks);
  for (auto& communicator : group) {
    const bool late = communicator->rank() == late_rank();
    communicator = StartLast(std::move(communicator), &progress,
                             late ? LateCollectives() : std::set<Collective>());
  }
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                          TrainNet(world, Delayed(progress, world.rank())));
    return CheckSameRecord(actual, expected, 0, 0);
  };
  EXPECT_OK(AllOk(RunRanks(group, run)));
}

INSTANTIATE_TEST_SUITE_P(
    All, LateRankTest,
    ::testing::Combine(::testing::Values(LateAt::kGather, LateAt::kReduce,
                                         LateAt::kAfterForward,
                                         LateAt::kBeforeStep),
                       ::testing::Values(0, 2)));

// --- Gathers ahead of use ----------------------------------------------------

Options LinearUnits() { return UnitsOf<torch::nn::LinearImpl>(); }

TEST(ExplicitPrefetchTest, ChangesTheOrderOfGathersAndNothingElse) {
  RecordedRanks ranks(2);
  Options options = LinearUnits();
  options.prefetch.forward = false;
  const auto train = [&](Communicator& world, bool ahead, int64_t& gathers) {
    CollectiveLog& log = ranks.logs[world.rank()];
    // Starts to gather a layer before it runs the one before it.
    const auto body = [ahead](Mlp& net, const at::Tensor& x) {
      if (ahead) ThrowIfError(Unshard(*net.second).status());
      const at::Tensor y = Forward(net.first, x).tanh();
      if (ahead) ThrowIfError(Unshard(*net.third).status());
      return Forward(net.third, Forward(net.second, y).tanh());
    };
    auto model = ValueOrThrow(
        FullyShard(std::make_shared<Mlp>(body), Unowned(world), options));
    log.Clear();
    TaskRecord record = ValueOrThrow(RunSharded(TenStepsOfAdam(), model));
    gathers = log.TotalsOf(Collective::kAllGather).count;
    return record;
  };
  EXPECT_OK(
      AllOk(RunRanks(ranks.group, [&](Communicator& world) -> absl::Status {
        int64_t on_demand = 0;
        int64_t ahead = 0;
        const TaskRecord expected = train(world, false, on_demand);
        const TaskRecord actual = train(world, true, ahead);
        FSDP_RETURN_IF_ERROR(CheckSameRecord(actual, expected, 0, 0));
        return Check(ahead == on_demand,
                     absl::StrCat(ahead, " gathers, not ", on_demand));
      })));
}

// --- Gathers by an extension -------------------------------------------------

constexpr int kSteps = 3;
constexpr double kRate = 0.1;

// Sends numbers as int16, in steps of 1/64.
class FixedPoint : public comm::GatherExtension {
 public:
  explicit FixedPoint(std::string name = "fixed point")
      : name_(std::move(name)) {}

  static at::Tensor Rounded(const at::Tensor& numbers) {
    return numbers.mul(64).round().div(64);
  }
  std::string ToString() const override { return name_; }
  int64_t MessageBytes(int64_t numel, at::ScalarType, int) const override {
    return 2 * numel;
  }
  void Write(absl::string_view label, const at::Tensor& numbers,
             const at::Tensor& message) override {
    labels.push_back(std::string(label));
    message.view(at::kShort).copy_(numbers.mul(64).round());
  }
  void Read(absl::string_view, const at::Tensor& messages,
            const at::Tensor& numbers) override {
    numbers.copy_(messages.view(at::kShort)).div_(64);
  }
  std::vector<std::string> labels;

 private:
  const std::string name_;
};

Options Extended(std::shared_ptr<FixedPoint> extension) {
  Options options = BlockUnits();
  options.quantize.gather = true;
  options.quantize.gather_extension = std::move(extension);
  return options;
}

at::Tensor RowsOf(int step, int rank, int ranks) {
  return Rows(int64_t{3} * (step * ranks + rank), 3, kDim);
}

// Trains with plain LibTorch: computes with rounded parameters and steps exact
// ones.
std::shared_ptr<NetImpl> TrainPlain(int ranks) {
  std::shared_ptr<NetImpl> exact = MakeNet(kDim, kBlocks);
  const std::shared_ptr<NetImpl> rounded = MakeNet(kDim, kBlocks);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> from = exact->parameters();
    std::vector<at::Tensor> to = rounded->parameters();
    {
      const c10::NoGradGuard no_grad;
      for (size_t i = 0; i < from.size(); ++i) {
        to[i].copy_(FixedPoint::Rounded(from[i]));
      }
    }
    rounded->zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const at::Tensor x = RowsOf(step, rank, ranks);
      (Loss(rounded->forward(x), x) / ranks).backward();
    }
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      from[i].sub_(to[i].grad(), kRate);
    }
  }
  return exact;
}

TEST(GatherExtensionTrainingTest, ComputesWithWhatItReadsAndStepsExactShards) {
  const std::shared_ptr<NetImpl> plain = TrainPlain(kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    const auto extension = std::make_shared<FixedPoint>();
    CollectiveLog log;
    FSDP_ASSIGN_OR_RETURN(auto own, world.Split(0, world.rank()));
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeNet(kDim, kBlocks),
                                     std::shared_ptr<Communicator>(
                                         comm::Record(std::move(own), &log)),
                                     Extended(extension)));
    log.Clear();
    torch::optim::SGD optimizer(model->Parameters(),
                                torch::optim::SGDOptions(kRate));
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor x = RowsOf(step, world.rank(), kRanks);
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      optimizer.step();
    }
    for (const auto& record : log.Trace()) {
      if (record.collective != Collective::kAllGather) continue;
      int64_t whole = 0;
      for (int unit = 0; unit < model->sharded_model().num_units(); ++unit) {
        if (model->sharded_model().unit_name(unit) != record.label) continue;
        whole = model->sharded_model().flats(unit)[0]->unsharded_bytes();
      }
      EXPECT_EQ(2 * record.bytes, whole) << record.label;
    }
    const std::vector<std::string>& labels = extension->labels;
    EXPECT_EQ(labels.empty() ? "none" : labels.front(), "root");
    const auto expected = plain->named_parameters();
    for (const TensorRange& named : model->Ranges()) {
      FSDP_RETURN_IF_ERROR(CheckTensor(named.values,
                                       OwnPart(named, expected[named.name]),
                                       1e-5, 1e-6, named.name));
    }
    return absl::OkStatus();
  }));
}

TEST(GatherExtensionTrainingTest, RanksThatHaveOthersOrNoUseAreRefused) {
  for (const bool gather : {false, true}) {
    const auto shard = [gather](Communicator& world) {
      Options options = Extended(
          std::make_shared<FixedPoint>(absl::StrCat("of rank ", world.rank())));
      options.quantize.gather = gather;
      return FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
    };
    EXPECT_THAT(RunRanks(2, shard),
                AllRefuse(gather ? "of rank 1" : "`gather` is false",
                          Code::kInvalidArgument));
  }
}

// --- Order -------------------------------------------------------------------

at::Tensor InOrder(Mlp& net, const at::Tensor& x) {
  return Forward(net.second, Forward(net.first, x));
}
at::Tensor Swapped(Mlp& net, const at::Tensor& x) {
  return Forward(net.first, Forward(net.second, x));
}

// Rank 1 swaps two layers in the step with the number `from` and later ones.
absl::Status StepsInDifferentOrder(Communicator& world, const Options& options,
                                   int from) {
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(Filled<Mlp>(), Unowned(world), options));
  const TensorFunction forward = [&model](const at::Tensor& x) {
    return model->forward(x);
  };
  for (int step = 0; step < 4; ++step) {
    model.module()->body =
        world.rank() == 1 && step >= from ? Swapped : InOrder;
    FSDP_RETURN_IF_ERROR(model->Backward(PartLoss(forward, 0)));
  }
  return absl::OkStatus();
}

TEST(OrderTest, ABackendThatSeesLabelsNamesBothUnitsOnAllRanks) {
  const auto run = [](Communicator& world) {
    return StepsInDifferentOrder(world, LinearUnits(), /*from=*/1);
  };
  EXPECT_THAT(RunRanks(kRanks, run),
              Each(StatusIs(Code::kInvalidArgument,
                            AllOf(HasSubstr("first"), HasSubstr("second"),
                                  HasSubstr("rank 1")))));
}

// Behaves like a backend that moves bytes and compares no labels.
class Unlabelled final : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

 private:
  comm::StartedWork DoCollective(const comm::CollectiveArgs& args,
                                 absl::string_view label) override {
    const bool is_labelled = args.collective != Collective::kAllGather &&
                             args.collective != Collective::kReduceScatter;
    return base().StartCollective(args, is_labelled ? label : "");
  }
};

// Without prefetching, the ranks differ only in the units' order.
std::vector<absl::Status> StepsOverBlindRanks(bool check_order) {
  Options options = LinearUnits();
  options.checks.order = check_order;
  options.prefetch.forward = false;
  options.prefetch.backward = false;
  auto group = ValueOrThrow(comm::CreateLocalGroup(kRanks));
  for (auto& communicator : group) {
    communicator = std::make_unique<Unlabelled>(std::move(communicator));
  }
  return RunRanks(group, [&](Communicator& world) {
    return StepsInDifferentOrder(world, options, /*from=*/0);
  });
}

TEST(OrderTest, WhereTheBackendIsBlindTheFirstBackwardNamesTheDifference) {
  EXPECT_THAT(
      StepsOverBlindRanks(/*check_order=*/true),
      Each(StatusIs(Code::kInvalidArgument,
                    AllOf(HasSubstr("the collectives of an iteration differ "
                                    "between ranks: rank 1 from rank 0"),
                          HasSubstr("first"), HasSubstr("second")))));
}

TEST(OrderTest, IsComparedUnlessToldOtherwise) {
  EXPECT_OK(AllOk(StepsOverBlindRanks(/*check_order=*/false)));
}

// --- Memory ------------------------------------------------------------------

struct Measured {
  std::vector<int64_t> peaks;  // of each step
  std::vector<int64_t> live;   // after each step
};

absl::StatusOr<Measured> MeasureSteps(Communicator& world, MemoryMeter& meter,
                                      int64_t dim, int blocks) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(dim, blocks),
                                               Unowned(world), BlockUnits()));
  Measured measured;
  for (int step = 0; step < 4; ++step) {
    meter.TakePeak();
    const at::Tensor x = Rows(world.rank(), 1, dim);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
    measured.peaks.push_back(meter.TakePeak());
    measured.live.push_back(meter.live());
  }
  return measured;
}

// Torch allocates shards and their gradients, the root and two units, two
// reduce buffers, and one unit's gradients as autograd makes them.
TEST(MemoryTest, AllAllocationsOfAStepFitTheUnitsThatAreWholeAndRepeat) {
  constexpr int64_t kWidth = 64;
  constexpr int kManyBlocks = 8;
  constexpr int64_t kBlock = 4 * (2 * kWidth * 2 * kWidth + 3 * kWidth);
  constexpr int64_t kRoot = 4 * (2 * kWidth * kWidth + 2 * kWidth);
  constexpr int64_t kModel = kRoot + kManyBlocks * kBlock;
  constexpr int64_t kActivations = int64_t{64} * 1024;
  static_assert(kActivations < kBlock);
  EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
    const auto meter = std::make_shared<MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    FSDP_ASSIGN_OR_RETURN(const Measured measured,
                          MeasureSteps(world, *meter, kWidth, kManyBlocks));
    const int64_t bound = 2 * kModel / 4 + kRoot + 2 * kBlock + 2 * kBlock +
                          kBlock + kActivations;
    for (size_t step = 0; step < measured.peaks.size(); ++step) {
      EXPECT_LE(measured.peaks[step], bound) << "step " << step;
      if (step <= 1) continue;
      EXPECT_EQ(measured.peaks[step], measured.peaks[1]) << "step " << step;
      EXPECT_EQ(measured.live[step], measured.live[1]) << "step " << step;
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
