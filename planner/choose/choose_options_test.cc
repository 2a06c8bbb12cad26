#include "planner/choose/choose_options.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/utils.h>

#include <cstdlib>
#include <ostream>
#include <stdexcept>

#include "base/testing/fake_device.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/model/forward.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/captured_training.h"
#include "fsdp/testing/memory_meter.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::testing::Not;

constexpr int64_t kDim = 128;
constexpr int kBlocks = 6;
constexpr int kManyBlocks = 24;  // beside which a unit's transfers are small
constexpr int64_t kRows = 64;
constexpr int64_t kPlenty = int64_t{1} << 30;

std::shared_ptr<NetImpl> DeferredNet(int blocks = kBlocks) {
  const DeferredInit deferred;
  return std::make_shared<NetImpl>(kDim, blocks);
}

StepCosts SomeCosts() {
  StepCosts costs;
  costs.memory_bandwidth = 1e10;
  costs.latency = 1e-5;
  costs.gather_bandwidth = costs.reduce_bandwidth = 1e9;
  costs.host_bandwidth = costs.ssd_bandwidth = 1e9;
  return costs;
}

AutoOptions Wanted(const std::shared_ptr<NetImpl>& net, int64_t memory_bytes) {
  AutoOptions wanted;
  wanted.memory_bytes = memory_bytes;
  wanted.rows = kRows;
  wanted.loss = [net = net.get()](int64_t rows) {
    const at::Tensor x = Rows(0, rows, kDim).to(net->embed->weight.device());
    // The sharded model casts, too.
    const at::Tensor cast = x.to(net->embed->weight.scalar_type());
    return Loss(net->forward(cast).to(at::kFloat), x);
  };
  wanted.base = BlockUnits();
  wanted.costs = SomeCosts();
  return wanted;
}

const Candidate& ChosenOf(const AutoChoice& choice) {
  return choice.considered[choice.chosen];
}

// Returns the bytes of the smallest candidate that rests in memory.
int64_t LeastBytes(const AutoChoice& choice) {
  int64_t least = kPlenty;
  for (const Candidate& each : choice.considered) {
    if (each.rests == "memory") least = std::min(least, each.bytes());
  }
  return least;
}

// Runs ranks as threads, each on one core at most.
absl::Status OnRanks(int ranks,
                     const std::function<absl::Status(Communicator&)>& run) {
  return RunAllRanks(ranks, [&](Communicator& communicator) {
    at::set_num_threads(1);
    return run(communicator);
  });
}

bool RanksShareMemory() { return std::getenv("RUN_RANKS_SHARING_MEMORY"); }

// Returns the most that a rank allocates while it trains by `choice`.
absl::StatusOr<int64_t> MeasuredPeak(const std::shared_ptr<NetImpl>& net,
                                     Communicator& ranks,
                                     const AutoChoice& choice) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(net, Unowned(ranks), choice.options));
  FusedAdamW optimizer(model->Parameters());
  const at::Tensor x = Rows(0, kRows, kDim);
  for (int step = 0; step < 3; ++step) {
    if (step == 1) meter->TakePeak();
    FSDP_RETURN_IF_ERROR(
        model->Backward(Loss(model->forward(x).to(at::kFloat), x)));
    optimizer.step();
    optimizer.zero_grad();
  }
  const MemoryPlan plan = model->PlanMemory();
  EXPECT_EQ(plan.ToString(), choice.plan.ToString());
  EXPECT_EQ(plan.total(), choice.plan.total());
  return meter->peak();
}

// Checks that the choice trains, by the plan, and in the memory that was said.
absl::Status CheckChoice(const std::shared_ptr<NetImpl>& net,
                         Communicator& ranks, const AutoChoice& choice,
                         double tolerance = 0.02) {
  const Candidate& chosen = ChosenOf(choice);
  EXPECT_TRUE(chosen.Fits(choice.memory_bytes)) << choice.ToString();
  EXPECT_EQ(chosen.plan.total(), choice.plan.total());
  FSDP_ASSIGN_OR_RETURN(const int64_t peak, MeasuredPeak(net, ranks, choice));
  // Common memory belongs to no tensor, and one rank's gradients come and go.
  if (RanksShareMemory() || ranks.world_size() == 1) return absl::OkStatus();
  const auto planned = static_cast<double>(chosen.bytes());
  EXPECT_NEAR(static_cast<double>(peak), planned, tolerance * planned)
      << choice.ToString();
  return absl::OkStatus();
}

class WorldTest : public ::testing::TestWithParam<int> {};

// The least memory that something fits into is that of the smallest candidate.
TEST_P(WorldTest, FitsIntoTheLeastMemory) {
  EXPECT_OK(OnRanks(GetParam(), [](Communicator& ranks) -> absl::Status {
    const auto net = DeferredNet();
    AutoOptions wanted = Wanted(net, kPlenty);
    FSDP_ASSIGN_OR_RETURN(const AutoChoice rich,
                          ChooseOptions(net, Unowned(ranks), wanted));
    const int64_t least = LeastBytes(rich);
    wanted.memory_bytes = least;
    FSDP_ASSIGN_OR_RETURN(const AutoChoice poor,
                          ChooseOptions(net, Unowned(ranks), wanted));
    EXPECT_EQ(ChosenOf(poor).bytes(), least) << poor.ToString();
    EXPECT_TRUE(ChosenOf(poor).recompute) << poor.ToString();
    wanted.memory_bytes = least - 1;
    EXPECT_THAT(
        ChooseOptions(net, Unowned(ranks), wanted).status(),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("(1 bytes)")));
    return CheckChoice(net, ranks, poor);
  }));
}

TEST_P(WorldTest, FilesMakeRoom) {
  EXPECT_OK(OnRanks(GetParam(), [](Communicator& ranks) -> absl::Status {
    const auto net = DeferredNet(kManyBlocks);
    AutoOptions wanted = Wanted(net, kPlenty);
    wanted.base.offload.directory = ::testing::TempDir();
    FSDP_ASSIGN_OR_RETURN(const AutoChoice rich,
                          ChooseOptions(net, Unowned(ranks), wanted));
    EXPECT_EQ(ChosenOf(rich).rests, "memory") << rich.ToString();
    const int64_t least = LeastBytes(rich);
    wanted.memory_bytes = least - 1;
    FSDP_ASSIGN_OR_RETURN(const AutoChoice poor,
                          ChooseOptions(net, Unowned(ranks), wanted));
    EXPECT_EQ(ChosenOf(poor).rests, "ssd") << poor.ToString();
    EXPECT_TRUE(ChosenOf(poor).Fits(least - 1)) << poor.ToString();
    return MeasuredPeak(net, ranks, poor).status();
  }));
}

// A model on a device may use the memory of its host.
TEST(ChooseOptionsTest, OnADeviceTheHostsMemoryMakesRoom) {
  FakeDevice::Register();
  ASSERT_OK_AND_ASSIGN(const auto ranks, FakeDeviceWorld(1));
  const auto net = MakeNet(kDim, kManyBlocks);
  FakeDevice::Move(net->parameters());
  AutoOptions wanted = Wanted(net, kPlenty);
  wanted.host_bytes = kPlenty;
  wanted.rows = 8;
  wanted.costs.reset();
  ASSERT_OK_AND_ASSIGN(const AutoChoice rich,
                       ChooseOptions(net, ranks, wanted));
  EXPECT_EQ(ChosenOf(rich).rests, "memory") << rich.ToString();
  wanted.memory_bytes = LeastBytes(rich) - 1;
  ASSERT_OK_AND_ASSIGN(const AutoChoice poor,
                       ChooseOptions(net, ranks, wanted));
  EXPECT_EQ(ChosenOf(poor).rests, "cpu") << poor.ToString();
  ASSERT_OK_AND_ASSIGN(const auto model, FullyShard(net, ranks, poor.options));
  EXPECT_EQ(model->PlanMemory().total(), poor.plan.total());
  EXPECT_TRUE(model->offload_stats().has_value());
}

// Whatever trains in some memory trains in more of it. Copies in bfloat16 are
// made of what stays alone. Each rank computes each choice, so that more ranks
// try fewer.
TEST_P(WorldTest, MoreMemoryIsNotRefused) {
  EXPECT_OK(OnRanks(GetParam(), [](Communicator& ranks) -> absl::Status {
    const auto net = DeferredNet(kManyBlocks);
    AutoOptions wanted = Wanted(net, kPlenty);
    wanted.rows = 1;
    wanted.base.unit.precision = ComputeIn(c10::kBFloat16);
    wanted.base.offload.directory = ::testing::TempDir();
    FSDP_ASSIGN_OR_RETURN(const AutoChoice rich,
                          ChooseOptions(net, Unowned(ranks), wanted));
    const int64_t in_memory = LeastBytes(rich);
    bool has_fitted = false;
    for (int part = 100; part <= 160; part += ranks.world_size()) {
      wanted.memory_bytes = in_memory * part / 160;
      const auto choice = ChooseOptions(net, Unowned(ranks), wanted);
      if (has_fitted && !choice.ok()) return choice.status();
      has_fitted |= choice.ok();
    }
    EXPECT_TRUE(has_fitted);
    return absl::OkStatus();
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, WorldTest, ::testing::Values(1, 2, 3, 5, 8));

struct Variant {
  const char* name;
  std::function<void(NetImpl&)> change = [](NetImpl&) {};
  std::function<void(AutoOptions&)> want = [](AutoOptions&) {};
  double tolerance = 0.02;
};
void PrintTo(const Variant& v, std::ostream* out) { *out << v.name; }

// Autograd adds up gradients of tied weights in memory that nobody counts.
constexpr double kOfTied = 0.04;

class VariantTest : public ::testing::TestWithParam<Variant> {};

TEST_P(VariantTest, IsPlannedAsItIsSharded) {
  for (const bool is_deferred : {true, false}) {
    EXPECT_OK(OnRanks(3, [&](Communicator& ranks) -> absl::Status {
      const auto net = is_deferred ? DeferredNet() : MakeNet(kDim, kBlocks);
      GetParam().change(*net);
      AutoOptions wanted = Wanted(net, kPlenty);
      GetParam().want(wanted);
      FSDP_ASSIGN_OR_RETURN(const AutoChoice choice,
                            ChooseOptions(net, Unowned(ranks), wanted));
      return CheckChoice(net, ranks, choice, GetParam().tolerance);
    })) << (is_deferred ? "deferred" : "with values");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, VariantTest,
    ::testing::Values(
        Variant{"PartlyFrozen",
                [](NetImpl& net) {
                  for (const auto& block : *net.blocks) {
                    block->as<BlockImpl>()->fc->weight.set_requires_grad(false);
                  }
                }},
        Variant{"TiedAcrossUnits",
                [](NetImpl& net) {
                  EXPECT_OK(Tie(net.blocks[0]->as<BlockImpl>()->out->weight,
                                net.blocks[4]->as<BlockImpl>()->out->weight));
                },
                [](AutoOptions&) {}, kOfTied},
        Variant{"InBf16", [](NetImpl&) {},
                [](AutoOptions& wanted) {
                  wanted.base.unit.precision = ComputeIn(at::kBFloat16);
                }}),
    [](const ::testing::TestParamInfo<Variant>& info) {
      return std::string(info.param.name);
    });

// --- The model is as it was -------------------------------------------------

TEST(ChooseOptionsTest, DeferredTensorsStayDeferred) {
  EXPECT_OK(OnRanks(2, [](Communicator& ranks) -> absl::Status {
    torch::manual_seed(7);
    const auto net = DeferredNet();
    FSDP_RETURN_IF_ERROR(
        ChooseOptions(net, Unowned(ranks), Wanted(net, kPlenty)).status());
    for (const auto& item : net->named_parameters()) {
      const bool is_large = item.value().nbytes() >= size_t{64} << 10;
      EXPECT_TRUE(IsDeferred(item.value()) == is_large &&
                  item.value().is_leaf() && item.value().requires_grad() &&
                  !item.value().grad().defined())
          << item.key();
    }
    return absl::OkStatus();
  }));
}

// Has a weight with gaps, which are no more where it is sharded, and a buffer
// that it writes.
class GapsImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    counts.add_(1);
    ever_with_gaps |= !weight.is_contiguous();
    ever_written |= weight.ne(0).any().item<bool>();
    return x.matmul(weight);
  }

  at::Tensor weight =
      register_parameter("weight", torch::ones({kDim, 200}).narrow(1, 0, kDim));
  at::Tensor counts =
      register_buffer("counts", torch::ones({kDim, 200}).narrow(1, 0, kDim));
  bool ever_with_gaps = false;
  bool ever_written = false;
};

TEST(ChooseOptionsTest, StandInsAreAsDenseAsShardedParameters) {
  std::shared_ptr<GapsImpl> net;
  {
    const DeferredInit deferred(DeferredInitOptions{/*min_bytes=*/0});
    net = std::make_shared<GapsImpl>();
  }
  AutoOptions wanted;
  wanted.memory_bytes = kPlenty;
  wanted.rows = 5;
  wanted.loss = [&](int64_t rows) {
    return net->forward(at::ones({rows, kDim})).sum();
  };
  wanted.costs = SomeCosts();
  EXPECT_OK(RunAllRanks(1, [&](Communicator& ranks) {
    return ChooseOptions(net, Unowned(ranks), wanted).status();
  }));
  EXPECT_FALSE(net->ever_with_gaps);
  EXPECT_FALSE(net->ever_written);
}

// Has batch normalisation, whose buffers a forward writes, and dropout, which
// draws.
class NormImpl : public torch::nn::Module {
 public:
  NormImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(4))),
        linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::nn::functional::dropout(linear->forward(norm->forward(x)));
  }

  torch::nn::BatchNorm1d norm;
  torch::nn::Linear linear;
};

TEST(ChooseOptionsTest, LeavesValuesBuffersGradientsAndRandomStates) {
  at::set_num_threads(1);
  const auto net = std::make_shared<NormImpl>();
  net->linear->weight.mutable_grad() = at::ones({4, 4});
  std::vector<at::Tensor> before;
  for (const at::Tensor& p : net->parameters()) {
    before.push_back(p.detach().clone());
  }
  for (const at::Tensor& b : net->buffers()) before.push_back(b.clone());
  torch::manual_seed(3);
  const at::Tensor drawn = at::rand({4});
  torch::manual_seed(3);
  AutoOptions wanted;
  wanted.memory_bytes = kPlenty;
  wanted.rows = 5;
  wanted.loss = [&](int64_t rows) {
    return net->forward(at::ones({rows + 1, 4})).sum();
  };
  wanted.costs = SomeCosts();
  EXPECT_OK(RunAllRanks(1, [&](Communicator& ranks) {
    return ChooseOptions(net, Unowned(ranks), wanted).status();
  }));
  std::vector<at::Tensor> after = net->parameters();
  for (const at::Tensor& b : net->buffers()) after.push_back(b);
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(at::equal(after[i], before[i])) << i;
  }
  EXPECT_TRUE(at::equal(net->linear->weight.grad(), at::ones({4, 4})));
  EXPECT_FALSE(net->linear->bias.grad().defined());
  EXPECT_TRUE(at::equal(at::rand({4}), drawn));
  // Gradients arrive again.
  wanted.loss(3).backward();
  EXPECT_TRUE(net->linear->bias.grad().defined());
}

// --- What is considered -----------------------------------------------------

absl::StatusOr<std::string> TableFor(
    int ranks, const std::function<void(AutoOptions&)>& want,
    int rows_of_mesh = 0) {
  std::string table;
  FSDP_RETURN_IF_ERROR(
      OnRanks(ranks, [&](Communicator& communicator) -> absl::Status {
        const auto net = DeferredNet();
        AutoOptions wanted = Wanted(net, kPlenty);
        want(wanted);
        std::vector<comm::MeshDimension> dimensions = {{"shard", -1}};
        if (rows_of_mesh > 0) {
          dimensions.insert(dimensions.begin(), {"replicate", rows_of_mesh});
        }
        FSDP_ASSIGN_OR_RETURN(
            const comm::Mesh mesh,
            comm::Mesh::Create(Unowned(communicator), dimensions));
        FSDP_ASSIGN_OR_RETURN(const AutoChoice choice,
                              ChooseOptions(net, mesh, wanted));
        if (communicator.rank() == 0) {
          table = TableOf(choice.considered, choice.chosen, kPlenty, 1000);
        }
        return absl::OkStatus();
      }));
  return table;
}

TEST(ChooseOptionsTest, StrategiesAreThoseOfTheMesh) {
  const auto want = [](AutoOptions&) {};
  ASSERT_OK_AND_ASSIGN(std::string table, TableFor(1, want));
  EXPECT_THAT(table,
              AllOf(HasSubstr("full shard"), Not(HasSubstr("no shard"))));
  ASSERT_OK_AND_ASSIGN(table, TableFor(2, want));
  EXPECT_THAT(table, AllOf(HasSubstr("no shard"), Not(HasSubstr("hybrid"))));
  ASSERT_OK_AND_ASSIGN(table, TableFor(4, want, 2));
  EXPECT_THAT(table, HasSubstr("hybrid"));
}

TEST(ChooseOptionsTest, UnitsAreThoseOfThePolicy) {
  ASSERT_OK_AND_ASSIGN(std::string table, TableFor(2, [](AutoOptions& wanted) {
                         wanted.base.wrap_policy = nullptr;
                       }));
  EXPECT_THAT(table, AllOf(HasSubstr("root alone"), Not(HasSubstr("root and")),
                           Not(HasSubstr("yes       memory"))));
  ASSERT_OK_AND_ASSIGN(table, TableFor(2, [](AutoOptions& wanted) {
                         wanted.base.wrap_policy =
                             WrapModules<BlockImpl, torch::nn::LinearImpl>();
                       }));
  // All are units; or blocks alone, as smaller ones are left out; or none.
  EXPECT_THAT(table, AllOf(HasSubstr("root and 14"), HasSubstr("root and 6"),
                           HasSubstr("root alone")));
}

TEST(ChooseOptionsTest, RecomputationMayBeRuledOut) {
  for (const bool transparent : {false, true}) {
    ASSERT_OK_AND_ASSIGN(const std::string table,
                         TableFor(2, [&](AutoOptions& wanted) {
                           wanted.base.transparent = transparent;
                           wanted.may_recompute = transparent;
                         }));
    EXPECT_THAT(table, Not(HasSubstr("yes       memory")));
  }
  ASSERT_OK_AND_ASSIGN(const std::string table,
                       TableFor(2, [](AutoOptions&) {}));
  EXPECT_THAT(table, HasSubstr("yes       memory"));
}

TEST(ChooseOptionsTest, CostsAreMeasuredWhereNobodyGivesThem) {
  ASSERT_OK_AND_ASSIGN(const std::string table,
                       TableFor(2, [](AutoOptions& wanted) {
                         wanted.costs.reset();
                         wanted.base.offload.directory = ::testing::TempDir();
                       }));
  EXPECT_THAT(table, HasSubstr("chosen"));
}

// --- Errors -----------------------------------------------------------------

// All ranks have the same error, although only `rank` (-1: each) has a reason.
void ExpectRefusal(const std::function<void(AutoOptions&)>& change, int rank,
                   absl::StatusCode code, const char* text) {
  std::vector<absl::Status> errors(3);
  EXPECT_OK(OnRanks(3, [&](Communicator& ranks) -> absl::Status {
    const auto net = DeferredNet();
    AutoOptions wanted = Wanted(net, kPlenty);
    if (rank < 0 || ranks.rank() == rank) change(wanted);
    errors[ranks.rank()] = ChooseOptions(net, Unowned(ranks), wanted).status();
    // The group and the model are still of use.
    return FullyShard(net, Unowned(ranks), BlockUnits()).status();
  }));
  for (const absl::Status& error : errors) {
    EXPECT_THAT(error, StatusIs(code, HasSubstr(text)));
    EXPECT_EQ(error.message(), errors[0].message());
  }
}

TEST(ChooseOptionsTest, RefusesWhatMakesNoSense) {
  const auto refuses = [](const std::function<void(AutoOptions&)>& change,
                          const char* text) {
    ExpectRefusal(change, 1, absl::StatusCode::kInvalidArgument, text);
  };
  refuses([](AutoOptions& w) { w.memory_bytes = 0; }, "memory_bytes is 0");
  refuses([](AutoOptions& w) { w.rows = 0; }, "rows is 0");
  refuses([](AutoOptions& w) { w.loss = nullptr; }, "loss is empty");
  refuses([](AutoOptions& w) { w.host_bytes = -1; }, "-1 bytes of the host");
  refuses([](AutoOptions& w) { w.memory.backwards_per_step = 0; },
          "0 backwards");
  refuses([](AutoOptions& w) { w.memory.optimizer_state = -2; }, "-2 bytes");
  refuses([](AutoOptions& w) { w.costs->latency = -1; }, "latency is -1");
  refuses([](AutoOptions& w) { w.costs->ssd_bandwidth = 0; },
          "ssd_bandwidth is 0");
  refuses([](AutoOptions& w) { w.base.quantize.gather = true; }, "quantize");
  refuses([](AutoOptions& w) { w.base.unit.backward_group_size = 1; },
          "backward_group_size");
  refuses([](AutoOptions& w) { w.base.offload.optimizer = Tier::kSsd; },
          "tiers");
  refuses([](AutoOptions& w) { w.base.offload.keep = true; }, "keep");
  refuses(
      [](AutoOptions& w) {
        w.base.configure_unit = [](const std::string&, const torch::nn::Module&,
                                   UnitOptions&) {};
      },
      "configure_unit");
  refuses([](AutoOptions& w) { w.memory_bytes = kPlenty + 1; },
          "the models to choose options for differ");
  refuses([](AutoOptions& w) { w.base.init.seed = 5; }, "differ");
  refuses([](AutoOptions& w) { w.loss = [](int64_t) { return at::ones({}); }; },
          "no tensor of one element that requires grad");
}

TEST(ChooseOptionsTest, WhatALossThrowsIsTheErrorOfAll) {
  ExpectRefusal(
      [](AutoOptions& wanted) {
        wanted.loss = [](int64_t) -> at::Tensor {
          throw std::runtime_error("no data");
        };
      },
      2, absl::StatusCode::kUnknown, "no data");
  // Stand-ins are in place here.
  ExpectRefusal(
      [](AutoOptions& wanted) {
        const auto loss = wanted.loss;
        wanted.loss = [loss](int64_t rows) -> at::Tensor {
          if (rows == 2) throw std::runtime_error("no second row");
          return loss(rows);
        };
      },
      0, absl::StatusCode::kUnknown, "no second row");
}

TEST(ChooseOptionsTest, NothingFitsIsTheErrorOfAll) {
  ExpectRefusal([](AutoOptions& wanted) { wanted.memory_bytes = 1 << 20; }, -1,
                absl::StatusCode::kResourceExhausted,
                "Allow more memory, take fewer rows");
}

}  // namespace
}  // namespace fsdp::testing
