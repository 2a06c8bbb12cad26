#include "testing/gpt/options.h"

#include "base/testing/status_matchers.h"

namespace gpt {
namespace {

using ::fsdp::comm::Environment;
using ::fsdp::comm::StartedBy;

Environment Replica(int replica, int replicas) {
  Environment environment;
  environment.started_by = StartedBy::kRanksFlag;
  environment.replica = replica;
  environment.replicas = replicas;
  return environment;
}

TEST(OptionsOfReplicaTest, WhatEachWritesHasItsNumber) {
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
  // A run alone, and what starts replicas, is as it was.
  for (const int replicas : {0, 2}) {
    options.replicas = replicas;
    if (replicas == 0) options.replica_history = "";
    ASSERT_OK_AND_ASSIGN(const TrainOptions alone,
                         OptionsOfReplica(options, {}));
    EXPECT_EQ(alone.replicas, replicas);
    EXPECT_EQ(alone.json, "report.json");
  }
}

}  // namespace
}  // namespace gpt
