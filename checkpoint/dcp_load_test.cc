#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/dcp_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::ForwardingFileSystem;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;
constexpr char kFolder[] = "/dcp";

using Adam = torch::optim::Adam;
using AdamState = torch::optim::AdamParamState;

// A model that is not sharded and has stepped `seed` times.
struct Plain {
  explicit Plain(int seed, int64_t dim = kDim,
                 c10::ScalarType dtype = c10::kFloat)
      : model(MakeNet(dim, kBlocks, seed)),
        optimizer(model->parameters(),
                  torch::optim::AdamOptions(0.01 * (1 + seed)).eps(0.5)) {
    model->to(dtype);
    for (int step = 0; step < seed; ++step) {
      for (at::Tensor& parameter : model->parameters()) {
        parameter.mutable_grad() =
            at::full(parameter.sizes(), 0.5 + step, dtype);
      }
      optimizer.step();
    }
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model.get();
    run.optimizer = &optimizer;
    return run;
  }
  AdamState& StateOf(const std::string& name) {
    const at::Tensor parameter = model->named_parameters()[name];
    return dynamic_cast<AdamState&>(
        *optimizer.state().at(parameter.unsafeGetTensorImpl()));
  }

  std::shared_ptr<NetImpl> model;
  Adam optimizer;
};

bool IsSame(Plain& a, Plain& b) {
  const auto& options = [](Plain& one) {
    return dynamic_cast<torch::optim::AdamOptions&>(
        one.optimizer.param_groups()[0].options());
  };
  if (!(options(a) == options(b))) return false;
  for (const auto& item : a.model->named_parameters()) {
    AdamState& of_a = a.StateOf(item.key());
    AdamState& of_b = b.StateOf(item.key());
    if (!at::equal(item.value(), b.model->named_parameters()[item.key()]) ||
        of_a.step() != of_b.step() ||
        !at::equal(of_a.exp_avg(), of_b.exp_avg()) ||
        !at::equal(of_a.exp_avg_sq(), of_b.exp_avg_sq())) {
      return false;
    }
  }
  return true;
}

// Cannot read from call number `call` on; -1: it can.
class UnreadableFileSystem : public ForwardingFileSystem {
 public:
  UnreadableFileSystem(FileSystem& base, int64_t call)
      : ForwardingFileSystem(base), first_(call) {}
  int64_t calls() const { return calls_; }

 private:
  absl::Status BeforeReading(const std::string& path) override {
    const int64_t call = calls_++;
    if (first_ < 0 || call < first_) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("no more of ", path));
  }

  const int64_t first_;
  std::atomic<int64_t> calls_{0};
};

class DcpLoadTest : public ::testing::Test {
 protected:
  absl::Status Export(const TrainingRun& run,
                      const std::string& folder = kFolder) {
    ExportDcpOptions options;
    options.files = &disk_;
    return ExportDcp(folder, run, options);
  }
  static LoadDcpOptions From(FileSystem& files) {
    LoadDcpOptions options;
    options.files = &files;
    return options;
  }
  absl::Status Load(const TrainingRun& run) {
    return LoadDcp(kFolder, run, From(disk_));
  }

  SimulatedFileSystem disk_;
};

TEST_F(DcpLoadTest, FromOneProcessToRanksAndBack) {
  Plain first(/*seed=*/3);
  ASSERT_OK(Export(first.AsRun()));
  ASSERT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks, 1),
                                                 Unowned(world), BlockUnits()));
    Adam optimizer(model->Parameters());
    TrainingRun run;
    run.model = model.get();
    run.optimizer = &optimizer;
    FSDP_RETURN_IF_ERROR(LoadDcp(kFolder, run, From(disk_)));
    return Export(run, "/back");
  }));
  for (const char* const folder : {kFolder, "/back"}) {
    Plain loaded(/*seed=*/1);
    EXPECT_FALSE(IsSame(loaded, first));
    ASSERT_OK(LoadDcp(folder, loaded.AsRun(), From(disk_)));
    EXPECT_TRUE(IsSame(loaded, first)) << folder;
  }
}

TEST_F(DcpLoadTest, AModelAlone) {
  Plain first(/*seed=*/2);
  ASSERT_OK(Export(first.AsRun()));
  Plain other(/*seed=*/1);
  TrainingRun run;
  run.model = other.model.get();
  ASSERT_OK(Load(run));
  EXPECT_TRUE(at::equal(other.model->head->weight, first.model->head->weight));
  EXPECT_EQ(other.StateOf("head.weight").step(), 1);
  // And a folder that has no more is not enough for an optimizer.
  ASSERT_OK(RemoveTree(disk_, kFolder));
  ASSERT_OK(Export(run));
  EXPECT_THAT(Load(other.AsRun()),
              StatusIs(kInvalid, HasSubstr("/dcp: has no states of an "
                                           "optimizer: load the model alone, "
                                           "by LoadModel()")));
}

// One that has not stepped has groups, too.
TEST_F(DcpLoadTest, AnOptimizerBeforeItsFirstStep) {
  Plain first(/*seed=*/0);
  ASSERT_OK(Export(first.AsRun()));
  Plain other(/*seed=*/1);
  ASSERT_OK(Load(other.AsRun()));
  EXPECT_TRUE(other.optimizer.state().empty());
  EXPECT_EQ(other.optimizer.param_groups()[0].options().get_lr(), 0.01);
}

TEST_F(DcpLoadTest, ProgressIsThatOfTheModelAndTheOptimizer) {
  Plain plain(/*seed=*/1);
  ASSERT_OK(Export(plain.AsRun()));
  int64_t expected = 0;
  for (const at::Tensor& parameter : plain.model->parameters()) {
    expected += 3 * static_cast<int64_t>(parameter.nbytes());
  }
  int64_t last = 0;
  LoadDcpOptions options = From(disk_);
  options.progress = [&](int64_t done, int64_t all) {
    EXPECT_EQ(all, expected);
    last = done;
  };
  ASSERT_OK(LoadDcp(kFolder, plain.AsRun(), options));
  EXPECT_EQ(last, expected);
}

TEST_F(DcpLoadTest, WhatDoesNotFitIsRefused) {
  Plain first(/*seed=*/2);
  first.StateOf("head.bias").exp_avg_sq(at::Tensor());
  ASSERT_OK(Export(first.AsRun()));
  Plain other(/*seed=*/1);
  EXPECT_THAT(
      Load(other.AsRun()),
      StatusIs(kInvalid, HasSubstr("missing: exp_avg_sq of head.bias")));
  EXPECT_EQ(other.StateOf("head.weight").step(), 1);

  Plain wider(/*seed=*/1, kDim + 1);
  EXPECT_THAT(
      Load(wider.AsRun()),
      StatusIs(kInvalid, AllOf(HasSubstr("/dcp: the files do not fit the "
                                         "model, which is as before:\n"),
                               HasSubstr("\n  embed.bias: shape [5] instead "
                                         "of [6]\n"),
                               HasSubstr("\n  head.weight: shape "))));

  TrainingRun run = other.AsRun();
  torch::optim::SGD sgd(other.model->parameters(), /*lr=*/1);
  run.optimizer = &sgd;
  EXPECT_THAT(Load(run), StatusIs(kInvalid, HasSubstr("no state named step")));
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 1);
  torch::optim::AdamW adamw(other.model->parameters());
  run.optimizer = &adamw;
  EXPECT_THAT(Load(run), StatusIs(kInvalid, HasSubstr("is that of Adam")));
}

TEST_F(DcpLoadTest, OtherGroupsAreForThoseWhoAreNotStrict) {
  Plain first(/*seed=*/1);
  ASSERT_OK(Export(first.AsRun()));
  TrainingRun run = first.AsRun();
  Adam of_some({first.model->head->bias});
  run.optimizer = &of_some;
  EXPECT_THAT(Load(run),
              StatusIs(kInvalid, HasSubstr("the optimizer has a group of "
                                           "head.bias, which the state has "
                                           "not")));
  LoadDcpOptions options = From(disk_);
  options.strict = false;
  ASSERT_OK(LoadDcp(kFolder, run, options));
  EXPECT_EQ(of_some.state().size(), 1u);
}

// As PyTorch does it, whether there are states already or not: of less
// precision they would stop to decay.
TEST_F(DcpLoadTest, StatesBecomeOfTheirParametersDtype) {
  Plain first(/*seed=*/3, kDim, c10::kBFloat16);
  ASSERT_OK(Export(first.AsRun()));
  for (const int steps : {0, 1}) {
    Plain other(steps);
    ASSERT_OK(Load(other.AsRun()));
    AdamState& wanted = first.StateOf("head.weight");
    AdamState& state = other.StateOf("head.weight");
    EXPECT_EQ(state.step(), 3);
    EXPECT_EQ(state.exp_avg().scalar_type(), c10::kFloat);
    EXPECT_TRUE(at::equal(state.exp_avg(), wanted.exp_avg().to(c10::kFloat)));
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), c10::kFloat);
    EXPECT_TRUE(
        at::equal(state.exp_avg_sq(), wanted.exp_avg_sq().to(c10::kFloat)));
  }
}

// What a callback of the user's throws on one rank.
TEST_F(DcpLoadTest, WhatOneRankThrowsAllReturn) {
  Plain first(/*seed=*/1);
  ASSERT_OK(Export(first.AsRun()));
  const std::vector<absl::Status> statuses =
      RunRanks(2, [&](Communicator& world) {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(MakeNet(kDim, kBlocks, 1), Unowned(world),
                                   BlockUnits()));
        TrainingRun run;
        run.model = model.get();
        LoadDcpOptions options = From(disk_);
        options.progress = [&world](int64_t, int64_t) {
          if (world.rank() == 1) throw std::runtime_error("no more lines");
        };
        return LoadDcp(kFolder, run, options);
      });
  EXPECT_THAT(
      statuses,
      Each(StatusIs(absl::StatusCode::kUnknown,
                    AllOf(HasSubstr("rank 1: "), HasSubstr("no more lines")))));
}

// It could not begin with a parameter later.
TEST_F(DcpLoadTest, AdagradNeedsAStateOfEachParameter) {
  Plain first(/*seed=*/0);
  torch::optim::Adagrad of_some({first.model->head->bias});
  TrainingRun run = first.AsRun();
  run.optimizer = &of_some;
  ASSERT_OK(Export(run));
  torch::optim::Adagrad of_all(first.model->parameters());
  run.optimizer = &of_all;
  LoadDcpOptions options = From(disk_);
  options.strict = false;
  EXPECT_THAT(LoadDcp(kFolder, run, options),
              StatusIs(kInvalid, HasSubstr("embed.weight: there is no state of "
                                           "it")));
  EXPECT_EQ(of_all.state().size(), first.model->parameters().size());
}

TEST_F(DcpLoadTest, ADamagedFileIsRefused) {
  Plain first(/*seed=*/2);
  ASSERT_OK(Export(first.AsRun()));
  Plain other(/*seed=*/1);
  const at::Tensor before = other.model->head->weight.detach().clone();
  const std::string path = "/dcp/__0_0.distcp";
  ASSERT_OK_AND_ASSIGN(const auto file,
                       disk_.OpenForWriting(path, Caching::kCached));
  ASSERT_OK_AND_ASSIGN(const int64_t size, file->Size());
  // The last that is in it is a step.
  ASSERT_OK(file->SetSize(size - 1));
  EXPECT_THAT(Load(other.AsRun()),
              StatusIs(kInvalid,
                       AllOf(HasSubstr("/dcp/__0_0.distcp: has "),
                             HasSubstr("but \"optim.state."),
                             HasSubstr("the file is cut off; copy it again"))));
  EXPECT_TRUE(at::equal(other.model->head->weight, before));
  ASSERT_OK(disk_.RemoveFile(path));
  EXPECT_THAT(Load(other.AsRun()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path)));
  EXPECT_THAT(
      LoadDcp("/other", other.AsRun(), From(disk_)),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/other/.metadata")));
  EXPECT_THAT(Load(TrainingRun()),
              StatusIs(kInvalid, HasSubstr("the run has no model")));
}

// At any call for the disk, of one rank alone.
TEST_F(DcpLoadTest, WhatOneRankCannotReadAllRefuse) {
  Plain first(/*seed=*/1);
  ASSERT_OK(Export(first.AsRun()));
  int64_t calls = 1;  // of a whole load, once there was one
  for (int64_t call = -1; call < calls; call += 9) {
    UnreadableFileSystem files(disk_, call);
    const std::vector<absl::Status> statuses =
        RunRanks(2, [&](Communicator& world) {
          FSDP_ASSIGN_OR_RETURN(
              auto model, FullyShard(MakeNet(kDim, kBlocks, 1), Unowned(world),
                                     BlockUnits()));
          Adam optimizer(model->Parameters());
          TrainingRun run;
          run.model = model.get();
          run.optimizer = &optimizer;
          FileSystem& disk = disk_;
          return LoadDcp(kFolder, run, From(world.rank() == 1 ? files : disk));
        });
    if (call < 0) {
      ASSERT_THAT(statuses, Each(absl::OkStatus()));
      calls = files.calls();
      EXPECT_GT(calls, 20);
    } else {
      EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kUnavailable,
                                          HasSubstr("rank 1: "))))
          << call;
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
