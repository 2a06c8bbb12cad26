// A run whose files are kept ends at any moment, and another one goes on from
// its last finished step, to the bit. KnownProgramTest has runs that end after
// a step.
#include <torch/optim/adamw.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/testing/process_limits.h"
#include "comm/agreement.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::testing {
namespace {

using torch::optim::AdamWOptions;

using Model = FullyShardedDataParallel<NetImpl>;
namespace fs = std::filesystem;

constexpr int64_t kDim = 6;

// The moment at which a run ends.
enum class End {
  kAfterStep,      // as programs end
  kAfterBackward,  // gradients were on their way
  kAfterLoading,   // parameters had been replaced
};

class OffloadKeepTest : public ::testing::Test {
 protected:
  OffloadKeepTest()
      : directory_(
            fs::path(std::getenv("TEST_TMPDIR")) /
            ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }

  Options Kept() const {
    Options options = BlockUnits();
    options.offload.parameters = Tier::kSsd;
    options.offload.gradients = Tier::kSsd;
    options.offload.optimizer = Tier::kSsd;
    options.offload.directory = directory_;
    options.offload.block_bytes = 4096;
    options.offload.keep = true;
    options.offload.name = "run";
    return options;
  }

  static std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(Model& model) {
    return std::make_unique<FusedAdamW>(model->Parameters(),
                                        AdamWOptions(1e-2));
  }

  // Returns the space, to be stepped without an optimizer.
  static OffloadSpace* SpaceOf(const Model& model) {
    const at::Tensor& shard = model->Ranges().front().values;
    return RestingMemory::Of(shard)->space().get();
  }

  static absl::Status Backward(Model& model, int64_t step) {
    const Communicator& world = model->communicator();
    const at::Tensor x =
        Rows((step * world.world_size() + world.rank()) * 3, 3, kDim);
    return model->Backward(Loss(model->forward(x), x));
  }

  // Runs up to `last` steps in all; `seed` is that of the module's initial
  // values.
  static absl::StatusOr<Values> Run(Communicator& world, const Options& options,
                                    int64_t last, int seed = 0,
                                    End end = End::kAfterStep) {
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(MakeNet(kDim, /*num_blocks=*/2, seed),
                                     Unowned(world), options));
    const auto optimizer = MakeOptimizer(model);
    const OffloadSpace* const space = model->sharded_model().offload();
    int64_t step = space == nullptr ? 0 : space->step();
    for (; step < last; ++step) {
      optimizer->zero_grad();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      optimizer->step();
    }
    FSDP_ASSIGN_OR_RETURN(Values values, ValuesOf(*model, *optimizer));
    if (end == End::kAfterBackward) {
      FSDP_RETURN_IF_ERROR(Backward(model, last));
    }
    if (end == End::kAfterLoading) {
      FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
          [](const std::string&, const at::Tensor& value) {
            value.zero_();
            return absl::OkStatus();
          },
          VisitOptions{/*writeback=*/true}));
    }
    return values;
  }

  const fs::path directory_;
};

TEST_F(OffloadKeepTest, WhatWasNotFinishedIsForgotten) {
  for (const End end : {End::kAfterBackward, End::kAfterLoading}) {
    const fs::path directory =
        directory_ / std::to_string(static_cast<int>(end));
    fs::create_directories(directory);
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      Options kept = Kept();
      kept.offload.directory = directory;
      FSDP_ASSIGN_OR_RETURN(const Values expected,
                            Run(world, BlockUnits(), /*last=*/5));
      FSDP_RETURN_IF_ERROR(
          Run(world, kept, /*last=*/2, /*seed=*/0, end).status());
      FSDP_ASSIGN_OR_RETURN(const Values actual, Run(world, kept, /*last=*/5));
      return CheckEqual(actual, expected);
    })) << static_cast<int>(end);
  }
}

// The run ends after the next step's begin, which commits what was loaded.
TEST_F(OffloadKeepTest, WhatWasLoadedIsKeptWholeOrNotAtAll) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    StateDict parameters;
    OptimizerStateDict states;
    Values expected;
    {
      FSDP_ASSIGN_OR_RETURN(
          Model other, FullyShard(MakeNet(kDim, 2, /*seed=*/8), Unowned(world),
                                  BlockUnits()));
      const auto optimizer = MakeOptimizer(other);
      FSDP_RETURN_IF_ERROR(Backward(other, /*step=*/0));
      optimizer->step();
      FSDP_ASSIGN_OR_RETURN(parameters, other->GatherStateDict());
      FSDP_ASSIGN_OR_RETURN(states, other->GatherOptimizerState(*optimizer));
      FSDP_ASSIGN_OR_RETURN(expected, ValuesOf(*other, *optimizer));
    }
    FSDP_ASSIGN_OR_RETURN(const Values three, Run(world, Kept(), /*last=*/3));
    for (const bool begins : {false, true}) {
      {
        FSDP_ASSIGN_OR_RETURN(
            Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), Kept()));
        const auto optimizer = MakeOptimizer(model);
        FSDP_RETURN_IF_ERROR(model->LoadStateDict(parameters));
        FSDP_RETURN_IF_ERROR(model->LoadOptimizerState(*optimizer, states));
        FSDP_ASSIGN_OR_RETURN(const auto loaded, ValuesOf(*model, *optimizer));
        FSDP_RETURN_IF_ERROR(CheckEqual(loaded, expected));
        OffloadSpace* const space = SpaceOf(model);
        if (begins) FSDP_RETURN_IF_ERROR(space->BeginStep());
      }
      FSDP_ASSIGN_OR_RETURN(const Values found, Run(world, Kept(), /*last=*/3));
      FSDP_RETURN_IF_ERROR(CheckEqual(found, begins ? expected : three));
    }
    return absl::OkStatus();
  }));
}

TEST_F(OffloadKeepTest, ARunThatHasFinishedNoStepBeginsAnew) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_RETURN_IF_ERROR(
        Run(world, Kept(), /*last=*/0, /*seed=*/4, End::kAfterBackward)
            .status());
    FSDP_ASSIGN_OR_RETURN(const Values expected,
                          Run(world, BlockUnits(), /*last=*/2));
    FSDP_ASSIGN_OR_RETURN(const Values actual, Run(world, Kept(), /*last=*/2));
    return CheckEqual(actual, expected);
  }));
}

// A rank was killed between the other ranks' commits: its files are those of
// the step before.
TEST_F(OffloadKeepTest, RanksGoBackToTheLastStepThatAllHaveFinished) {
  const fs::path older = directory_ / "older";
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_RETURN_IF_ERROR(Run(world, Kept(), /*last=*/3).status());
    {
      FSDP_ASSIGN_OR_RETURN(
          Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), Kept()));
      OffloadSpace* const space = SpaceOf(model);
      FSDP_RETURN_IF_ERROR(space->BeginStep());
      if (world.rank() == 1) {
        fs::create_directories(older);
        fs::copy_file(directory_ / "run.optimizer.1-of-2",
                      older / "run.optimizer.1-of-2");
      }
      FSDP_RETURN_IF_ERROR(space->EndStep(absl::OkStatus()));
      EXPECT_EQ(space->step(), 4);
    }
    if (world.rank() == 1) {
      fs::copy_file(older / "run.optimizer.1-of-2",
                    directory_ / "run.optimizer.1-of-2",
                    fs::copy_options::overwrite_existing);
    }
    FSDP_ASSIGN_OR_RETURN(const Values three,
                          Run(world, BlockUnits(), /*last=*/3));
    FSDP_ASSIGN_OR_RETURN(const auto six, Run(world, BlockUnits(), /*last=*/6));
    FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(MakeNet(kDim, 2, /*seed=*/9),
                                                  Unowned(world), Kept()));
    EXPECT_EQ(model->sharded_model().offload()->step(), 3);
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
    for (const auto& item : dict) {
      EXPECT_TRUE(at::equal(item.value(), three.at(item.key()))) << item.key();
    }
    const auto optimizer = MakeOptimizer(model);
    for (int64_t step = 3; step < 6; ++step) {
      optimizer->zero_grad();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      optimizer->step();
    }
    FSDP_ASSIGN_OR_RETURN(const Values actual, ValuesOf(*model, *optimizer));
    return CheckEqual(actual, six);
  }));
}

// A disk fails in a commit and is sound again. Another commit would drop the
// last one that all ranks have.
TEST_F(OffloadKeepTest, ACommitThatFailsIsTheLastOne) {
  std::optional<ResourceLimit> limit;
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const auto limit_on_rank_0 = [&](bool limited) {
      const absl::Time deadline = absl::Now() + world.default_timeout();
      FSDP_RETURN_IF_ERROR(comm::Barrier(world, "before", deadline));
      if (world.rank() == 0) limit.reset();
      if (world.rank() == 0 && limited) limit.emplace(RLIMIT_FSIZE, 0);
      return comm::Barrier(world, "after", deadline);
    };
    FSDP_RETURN_IF_ERROR(Run(world, Kept(), /*last=*/3).status());
    {
      FSDP_ASSIGN_OR_RETURN(
          Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), Kept()));
      OffloadSpace* const space = SpaceOf(model);
      FSDP_RETURN_IF_ERROR(space->BeginStep());
      FSDP_RETURN_IF_ERROR(limit_on_rank_0(true));
      EXPECT_OK(space->EndStep(absl::OkStatus()));
      FSDP_RETURN_IF_ERROR(limit_on_rank_0(false));
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(space->BeginStep(),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("could not be committed")));
      }
    }
    FSDP_ASSIGN_OR_RETURN(const auto five, Run(world, BlockUnits(), 5));
    FSDP_ASSIGN_OR_RETURN(const auto actual, Run(world, Kept(), 5));
    return CheckEqual(actual, five);
  }));
  std::signal(SIGXFSZ, previous);
}

TEST_F(OffloadKeepTest, FilesOfAnotherRunAreRefusedOnAllRanks) {
  const auto run = [&](int64_t dim) {
    return RunRanks(2, [&](Communicator& world) -> absl::Status {
      return FullyShard(MakeNet(dim, 2), Unowned(world), Kept()).status();
    });
  };
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) {
    return Run(world, Kept(), /*last=*/2).status();
  }));
  for (const absl::Status& status : run(/*dim=*/kDim + 1)) {
    EXPECT_FALSE(status.ok());
  }
  // One rank's file is replaced by another rank's.
  fs::copy_file(directory_ / "run.optimizer.0-of-2",
                directory_ / "run.optimizer.1-of-2",
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(run(kDim), AllRefuse("rank 1: "));
}

// One step() is one step of the run.
TEST_F(OffloadKeepTest, ASecondOptimizerIsRefusedOnAllRanks) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    Options options = Kept();
    options.offload.gradients = Tier::kDevice;
    FSDP_ASSIGN_OR_RETURN(
        Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), options));
    std::vector<at::Tensor> weights, biases;
    for (const TensorRange& named : model->Ranges()) {
      (named.sizes.size() > 1 ? weights : biases).push_back(named.values);
    }
    auto first = std::make_unique<FusedAdamW>(weights, AdamWOptions(1e-2));
    FusedAdamW second(biases, AdamWOptions(3e-3));
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    FSDP_RETURN_IF_ERROR(TorchToStatus("first", [&] { first->step(); }));
    FSDP_RETURN_IF_ERROR(
        CheckRefused(TorchToStatus("second", [&] { second.step(); }),
                     "another optimizer has stepped this model"));
    FSDP_RETURN_IF_ERROR(TorchToStatus("first", [&] { first->step(); }));
    first.reset();
    return TorchToStatus("second", [&] { second.step(); });
  }));
}

}  // namespace
}  // namespace fsdp::testing
