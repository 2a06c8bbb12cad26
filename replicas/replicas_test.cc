// Calls it as users do, with a keeper in this process and threads as ranks.
#include "replicas/replicas.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckThat;
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

// Has an environment of rank 0 of 1 in replica `replica`, and its keeper.
class ReplicasTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(comm::Listener listener, comm::Listen("127.0.0.1", 0));
    environment_.keeper_addr = "127.0.0.1";
    environment_.keeper_port = listener.port;
    environment_.secret = "of the test";
    ASSERT_OK_AND_ASSIGN(
        keeper_,
        comm::StoreServer::Start(std::move(listener.fd), environment_.secret));
  }

  comm::Environment EnvironmentOf(int replica, int replicas) const {
    comm::Environment environment = environment_;
    environment.replica = replica;
    environment.replicas = replicas;
    environment.replica_incarnation = 1;
    return environment;
  }

  comm::Environment environment_;
  std::unique_ptr<comm::StoreServer> keeper_;
};

// Makes each thread a replica of one rank.
absl::Status RunReplicas(
    int replicas,
    const std::function<absl::Status(int replica, Communicator& inside)>& fn) {
  return RunAllRanks(replicas, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto inside, world.Split(world.rank(), 0));
    return fn(world.rank(), *inside);
  });
}

TEST_F(ReplicasTest, TrainTogetherFromTheStateOfTheFurthest) {
  std::vector<std::string> texts(3);
  EXPECT_OK(
      RunReplicas(3, [&](int replica, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training,
                              Training::Make(inside, replica));
        ReplicaOptions options;
        options.steps = 6;
        options.first_step = replica == 1 ? 4 : 0;
        training->run.entries["of"] = absl::StrCat(replica);
        FSDP_ASSIGN_OR_RETURN(
            const auto replicas,
            Replicas::Join(EnvironmentOf(replica, 3), &training->run, options));
        int64_t expected = 4;
        for (;;) {
          FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
          if (!step.has_value()) break;
          FSDP_RETURN_IF_ERROR(CheckThat(
              (std::vector<int64_t>{step->step, step->index, step->size}),
              ElementsAre(expected, replica, 3), "step, index, size"));
          FSDP_RETURN_IF_ERROR(training->Compute(10 * step->step + replica));
          FSDP_RETURN_IF_ERROR(replicas->FinishStep());
          training->optimizer->step();
          FSDP_RETURN_IF_ERROR(
              CheckThat(replicas->steps_done(), ++expected, "steps done"));
        }
        FSDP_RETURN_IF_ERROR(CheckThat(expected, 6, "steps of the run"));
        texts[replica] = absl::StrCat(training->run.entries["of"], ": ",
                                      replicas->Members());
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
      if (!step.has_value()) return absl::InternalError("too few steps");
      FSDP_RETURN_IF_ERROR(CheckThat(step->step, expected, "step"));
      FSDP_RETURN_IF_ERROR(CheckThat(step->size, 1, "size of the step"));
      FSDP_RETURN_IF_ERROR(replicas->FinishStep());
    }
    FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
    if (!step.has_value()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("one more, step ", step->step));
  }));
}

TEST_F(ReplicasTest, CallsHaveTheirOrder) {
  EXPECT_OK(
      RunReplicas(1, [&](int replica, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(inside, 0));
        ReplicaOptions options;
        options.steps = 2;
        FSDP_ASSIGN_OR_RETURN(
            const auto replicas,
            Replicas::Join(EnvironmentOf(replica, 1), &training->run, options));
        EXPECT_THAT(replicas->FinishStep(),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("BeginStep")));
        FSDP_RETURN_IF_ERROR(replicas->BeginStep().status());
        EXPECT_THAT(replicas->BeginStep().status(),
                    StatusIs(absl::StatusCode::kFailedPrecondition,
                             HasSubstr("FinishStep")));
        FSDP_RETURN_IF_ERROR(training->Compute(0));
        return replicas->FinishStep();  // no step is the last
      }));
}

TEST_F(ReplicasTest, WhatDoesNotFitIsRefused) {
  EXPECT_OK(RunReplicas(
      1, [&](int /*replica*/, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(inside, 0));
        const auto is_refused = [](const char* text) {
          return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
        };
        const auto join =
            [&](const std::function<void(checkpoint::TrainingRun&)>& change,
                const ReplicaOptions& options = ReplicaOptions()) {
              checkpoint::TrainingRun run = training->run;
              change(run);
              return Replicas::Join(EnvironmentOf(0, 1), &run, options)
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
        comm::Environment two = EnvironmentOf(0, 1);
        two.world_size = 2;
        EXPECT_THAT(Replicas::Join(two, &training->run, {}).status(),
                    is_refused("sharded over 1 ranks"));
        return absl::OkStatus();
      }));
}

TEST_F(ReplicasTest, AKeeperThatDiesEndsAll) {
  EXPECT_OK(
      RunReplicas(1, [&](int replica, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(inside, 0));
        ReplicaOptions options;
        options.steps = 2;
        options.loss_timeout = absl::Milliseconds(200);
        FSDP_ASSIGN_OR_RETURN(
            const auto replicas,
            Replicas::Join(EnvironmentOf(replica, 1), &training->run, options));
        FSDP_RETURN_IF_ERROR(replicas->BeginStep().status());
        FSDP_RETURN_IF_ERROR(training->Compute(0));
        keeper_ = nullptr;
        const absl::Status status = replicas->FinishStep();
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                                     HasSubstr("keeper")));
        EXPECT_EQ(replicas->BeginStep().status(), status);  // it lasts
        return absl::OkStatus();
      }));
}

// Replica 1 waits in its second life for one that is lost only in the replay.
TEST_F(ReplicasTest, AReplayThatHasFailedEndsForAll) {
  const std::string history = checkpoint::testing::FreePath("history");
  ASSERT_TRUE(std::filesystem::create_directory(history));
  std::ofstream(history + "/replica-0.txt")
      << "epoch 0 founded at step 0 by 0.1: replicas 0.1 1.1\n"
         "epoch 1 within step 3: replicas 0.1\n"
         "epoch 2 from step 5: replicas 0.1 1.2\n";
  std::vector<absl::Status> ends(2);
  EXPECT_OK(
      RunReplicas(2, [&](int replica, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training, Training::Make(inside, 0));
        comm::Environment environment = EnvironmentOf(replica, 2);
        environment.replica_incarnation = 2;
        ReplicaOptions options;
        options.steps = 10;
        options.replay = history;
        FSDP_ASSIGN_OR_RETURN(
            const auto replicas,
            Replicas::Join(environment, &training->run, options));
        ends[replica] = replicas->BeginStep().status();
        return absl::OkStatus();
      }));
  EXPECT_THAT(ends[0], StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("no step of replica 0.2")));
  EXPECT_THAT(ends[1], StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("this replay has failed: "
                                          "replica 0.2: ")));
}

TEST_F(ReplicasTest, AModelThatDiffersIsRefusedAndTheOthersGoOn) {
  std::vector<absl::Status> ends(2);
  EXPECT_OK(
      RunReplicas(2, [&](int replica, Communicator& inside) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const auto training,
                              Training::Make(inside, 0, kDim + replica));
        ReplicaOptions options;
        options.steps = 2;
        options.loss_timeout = absl::Milliseconds(500);
        FSDP_ASSIGN_OR_RETURN(
            auto replicas,
            Replicas::Join(EnvironmentOf(replica, 2), &training->run, options));
        for (;;) {
          const auto step = replicas->BeginStep();
          ends[replica] = step.status();
          if (!step.ok() || !step->has_value()) break;
          FSDP_RETURN_IF_ERROR(training->Compute((*step)->step));
          FSDP_RETURN_IF_ERROR(replicas->FinishStep());
        }
        return absl::OkStatus();
      }));
  EXPECT_OK(ends[0]);
  EXPECT_THAT(ends[1], StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("embed.weight")));
}

}  // namespace
}  // namespace fsdp
