// Calls it as users do, with a keeper in this process and threads as ranks.
#include "replicas/replicas.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "replicas/testing/test_keeper.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::FreePath;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kDim = 5;

// A model of one rank and what trains it.
struct Training {
  static absl::StatusOr<std::unique_ptr<Training>> Make(Communicator& ranks,
                                                        int seed,
                                                        int64_t dim = kDim) {
    auto training = std::make_unique<Training>();
    FSDP_ASSIGN_OR_RETURN(training->model,
                          FullyShard(MakeNet(dim, 1, seed), Unowned(ranks)));
    training->dim = dim;
    training->optimizer = std::make_unique<torch::optim::SGD>(
        training->model->Parameters(), torch::optim::SGDOptions(0.1));
    training->run.model = training->model.get();
    training->run.optimizer = training->optimizer.get();
    training->run.random_state = false;
    return training;
  }

  absl::Status Compute(int64_t row) {
    const at::Tensor x = Rows(row, 2, dim);
    optimizer->zero_grad();
    return model->Backward(Loss(model->forward(x), x));
  }

  int64_t dim = kDim;
  FullyShardedDataParallel<NetImpl> model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  checkpoint::TrainingRun run;
};

// Replicas of one rank each.
struct Job {
  int replicas = 1;
  int incarnation = 1;
  ReplicaOptions options;
  int64_t first_step_of_1 = 0;  // replica 1's
  int64_t dim_of_1 = kDim;
};

class ReplicasTest : public ::testing::Test {
 protected:
  // Makes each thread a replica.
  absl::Status RunReplicas(
      const Job& job,
      const std::function<absl::Status(int replica, Training& training,
                                       Replicas& replicas)>& fn) {
    return RunAllRanks(job.replicas, [&](Communicator& world) -> absl::Status {
      const int replica = world.rank();
      FSDP_ASSIGN_OR_RETURN(const auto inside, world.Split(replica, 0));
      FSDP_ASSIGN_OR_RETURN(
          const auto training,
          Training::Make(*inside, replica, replica == 1 ? job.dim_of_1 : kDim));
      comm::Environment environment =
          keeper_.EnvironmentOf(replica, job.replicas);
      environment.replica_incarnation = job.incarnation;
      ReplicaOptions options = job.options;
      if (replica == 1) options.first_step = job.first_step_of_1;
      FSDP_ASSIGN_OR_RETURN(
          const auto replicas,
          Replicas::Join(environment, &training->run, options));
      return fn(replica, *training, *replicas);
    });
  }

  replicas::testing::TestKeeper keeper_;
};

TEST_F(ReplicasTest, TrainTogetherFromTheStateOfTheFurthest) {
  std::vector<std::string> texts(3);
  Job job;
  job.replicas = 3;
  job.options.steps = 6;
  job.first_step_of_1 = 4;
  EXPECT_OK(RunReplicas(
      job,
      [&](int replica, Training& training, Replicas& replicas) -> absl::Status {
        training.run.entries["of"] = absl::StrCat(replica);
        int64_t expected = 4;
        for (;;) {
          FSDP_ASSIGN_OR_RETURN(const auto step, replicas.BeginStep());
          if (!step.has_value()) break;
          EXPECT_THAT(
              (std::vector<int64_t>{step->step, step->index, step->size}),
              ElementsAre(expected, replica, 3));
          FSDP_RETURN_IF_ERROR(training.Compute(10 * step->step + replica));
          FSDP_RETURN_IF_ERROR(replicas.FinishStep());
          training.optimizer->step();
          EXPECT_EQ(replicas.steps_done(), ++expected);
        }
        EXPECT_EQ(expected, 6);
        texts[replica] =
            absl::StrCat(training.run.entries["of"], ": ", replicas.Members());
        return absl::OkStatus();
      }));
  EXPECT_THAT(texts, ::testing::Each("1: 0.1 1.1 2.1"));
}

TEST_F(ReplicasTest, WithoutOthersItIsPlainTraining) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& ranks) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(ranks, 0));
    ReplicaOptions options;
    options.steps = 3;
    options.first_step = 1;
    comm::Environment environment;
    environment.rank = ranks.rank();
    environment.world_size = 2;
    FSDP_ASSIGN_OR_RETURN(const auto replicas,
                          Replicas::Join(environment, &training->run, options));
    for (const int64_t expected : {1, 2}) {
      FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
      EXPECT_TRUE(step.has_value() && step->step == expected &&
                  step->size == 1);
      FSDP_RETURN_IF_ERROR(replicas->FinishStep());
    }
    FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
    EXPECT_FALSE(step.has_value());
    return absl::OkStatus();
  }));
}

TEST_F(ReplicasTest, CallsHaveTheirOrder) {
  Job job;
  job.options.steps = 2;
  EXPECT_OK(RunReplicas(job, [](int, Training& training, Replicas& replicas) {
    const auto is_refused = [](const char* text) {
      return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text));
    };
    EXPECT_THAT(replicas.FinishStep(), is_refused("BeginStep"));
    EXPECT_OK(replicas.BeginStep());
    EXPECT_THAT(replicas.BeginStep().status(), is_refused("FinishStep"));
    EXPECT_OK(training.Compute(0));
    return replicas.FinishStep();  // no step is the last
  }));
}

TEST_F(ReplicasTest, WhatDoesNotFitIsRefused) {
  EXPECT_OK(RunAllRanks(1, [&](Communicator& rank) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(rank, 0));
    const auto is_refused = [](const char* text) {
      return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
    };
    const auto join =
        [&](const std::function<void(checkpoint::TrainingRun&)>& change,
            const ReplicaOptions& options = ReplicaOptions()) {
          checkpoint::TrainingRun run = training->run;
          change(run);
          return Replicas::Join(keeper_.EnvironmentOf(0, 1), &run, options)
              .status();
        };
    EXPECT_THAT(join([](auto& run) { run.model = nullptr; }),
                is_refused("no model"));
    EXPECT_THAT(join([](auto& run) { run.optimizer = nullptr; }),
                is_refused("no optimizer"));
    ReplicaOptions negative;
    negative.steps = -1;
    EXPECT_THAT(join([](auto&) {}, negative), is_refused("steps (-1)"));
    ReplicaOptions hasty;
    hasty.loss_timeout = absl::Milliseconds(1);
    EXPECT_THAT(join([](auto&) {}, hasty), is_refused("loss_timeout"));
    comm::Environment two = keeper_.EnvironmentOf(0, 1);
    two.world_size = 2;
    EXPECT_THAT(Replicas::Join(two, &training->run, {}).status(),
                is_refused("sharded over 1 ranks"));
    return absl::OkStatus();
  }));
}

TEST_F(ReplicasTest, AKeeperThatDiesEndsAll) {
  Job job;
  job.options.steps = 2;
  job.options.loss_timeout = absl::Milliseconds(200);
  EXPECT_OK(RunReplicas(job, [&](int, Training& training, Replicas& replicas) {
    EXPECT_OK(replicas.BeginStep());
    EXPECT_OK(training.Compute(0));
    keeper_.End();
    const absl::Status status = replicas.FinishStep();
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("keeper")));
    EXPECT_EQ(replicas.BeginStep().status(), status);  // it lasts
    return absl::OkStatus();
  }));
}

// Replica 1 waits in its second life for one that is lost only in the replay.
TEST_F(ReplicasTest, AReplayThatHasFailedEndsForAll) {
  Job job;
  job.replicas = job.incarnation = 2;
  job.options.steps = 10;
  job.options.replay = FreePath("history");
  ASSERT_TRUE(std::filesystem::create_directory(job.options.replay));
  std::ofstream(job.options.replay + "/replica-0.txt")
      << "epoch 0 founded at step 0 by 0.1: replicas 0.1 1.1\n"
         "epoch 1 within step 3: replicas 0.1\n"
         "epoch 2 from step 5: replicas 0.1 1.2\n";
  EXPECT_OK(RunReplicas(job, [](int replica, Training&, Replicas& replicas) {
    EXPECT_THAT(replicas.BeginStep(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(replica == 0 ? "no step of replica 0.2"
                                                : "this replay has failed: "
                                                  "replica 0.2: ")));
    return absl::OkStatus();
  }));
}

TEST_F(ReplicasTest, AModelThatDiffersIsRefusedAndTheOthersGoOn) {
  Job job;
  job.replicas = 2;
  job.dim_of_1 = kDim + 1;
  job.options.steps = 2;
  job.options.loss_timeout = absl::Milliseconds(500);
  std::vector<absl::Status> ends(2);
  EXPECT_OK(RunReplicas(
      job,
      [&](int replica, Training& training, Replicas& replicas) -> absl::Status {
        for (;;) {
          const auto step = replicas.BeginStep();
          ends[replica] = step.status();
          if (!step.ok() || !step->has_value()) return absl::OkStatus();
          FSDP_RETURN_IF_ERROR(training.Compute((*step)->step));
          FSDP_RETURN_IF_ERROR(replicas.FinishStep());
        }
      }));
  EXPECT_OK(ends[0]);
  EXPECT_THAT(ends[1], StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("embed.weight")));
}

}  // namespace
}  // namespace fsdp
