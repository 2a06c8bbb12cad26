#include "testing/gpt/flags/replica_options.h"

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "comm/startup/environment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/gpt/flags/options.h"

namespace gpt {
namespace {

using ::fsdp::comm::Environment;
using ::fsdp::comm::StartedBy;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

Environment Replica(int replica, int replicas) {
  Environment environment;
  environment.started_by = StartedBy::kRanksFlag;
  environment.replica = replica;
  environment.replicas = replicas;
  return environment;
}

TEST(ReplicaOptionsTest, WhatEachWritesHasItsNumber) {
  TrainOptions options;
  options.json = "report.json";
  options.save = "/runs/gpt";
  options.save_init = "init";
  options.init = "here";
  options.export_dir = "model";
  options.replica_history = "history";
  ASSERT_OK_AND_ASSIGN(const TrainOptions mine,
                       OptionsOfReplica(options, Replica(2, 3)));
  EXPECT_EQ(mine.replicas, 3);
  EXPECT_EQ(mine.json, "report.json.2");
  EXPECT_EQ(mine.save, "/runs/gpt.2");
  EXPECT_EQ(mine.save_init, "init.2");
  EXPECT_EQ(mine.trace, "");
  // All read these, one of them writes them, or they have numbers anyway.
  EXPECT_EQ(mine.init, "here");
  EXPECT_EQ(mine.export_dir, "model");
  EXPECT_EQ(mine.replica_history, "history");
}

TEST(ReplicaOptionsTest, ARunAloneIsAsItWas) {
  TrainOptions options;
  options.json = "report.json";
  options.save = "/runs/gpt";
  options.trace = "trace";
  ASSERT_OK_AND_ASSIGN(const TrainOptions mine, OptionsOfReplica(options, {}));
  EXPECT_EQ(mine.replicas, 0);
  EXPECT_EQ(mine.json, "report.json");
  EXPECT_EQ(mine.save, "/runs/gpt");
  EXPECT_EQ(mine.trace, "trace");
}

TEST(ReplicaOptionsTest, WhatStartsReplicasIsNone) {
  TrainOptions options;
  options.replicas = 2;
  options.json = "report.json";
  options.replica_history = "history";
  ASSERT_OK_AND_ASSIGN(const TrainOptions mine, OptionsOfReplica(options, {}));
  EXPECT_EQ(mine.replicas, 2);
  EXPECT_EQ(mine.json, "report.json");
}

TEST(ReplicaOptionsTest, AsManyAsWereStarted) {
  TrainOptions options;
  options.replicas = 2;
  EXPECT_OK(OptionsOfReplica(options, Replica(1, 2)));
  EXPECT_THAT(OptionsOfReplica(options, Replica(1, 3)),
              StatusIs(kInvalid, HasSubstr("one of 3 replicas")));
  Environment rank;
  rank.started_by = StartedBy::kTorchrun;
  EXPECT_THAT(OptionsOfReplica(options, rank),
              StatusIs(kInvalid, HasSubstr("--replicas=2")));
}

TEST(ReplicaOptionsTest, WhatReplicasCannotDoIsRefusedWhereOthersStartThem) {
  TrainOptions options;
  options.device = Device::kCuda;
  EXPECT_OK(OptionsOfReplica(options, {}));
  EXPECT_THAT(OptionsOfReplica(options, Replica(0, 2)),
              StatusIs(kInvalid, HasSubstr("--replicas with --device=cuda")));
}

TEST(ReplicaOptionsTest, AHistoryIsOfReplicas) {
  TrainOptions options;
  options.replica_history = "history";
  EXPECT_THAT(OptionsOfReplica(options, {}),
              StatusIs(kInvalid, HasSubstr("--replica-history without")));
  options = {};
  options.replica_replay = "history";
  EXPECT_THAT(OptionsOfReplica(options, {}),
              StatusIs(kInvalid, HasSubstr("--replica-replay without")));
  EXPECT_OK(OptionsOfReplica(options, Replica(0, 1)));
}

}  // namespace
}  // namespace gpt
