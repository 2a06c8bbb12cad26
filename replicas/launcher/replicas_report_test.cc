#include "replicas/launcher/replicas_report.h"

#include <signal.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

ReplicasReport Ended(std::vector<ProcessEnd> replicas, int last_failed) {
  ReplicasReport report;
  report.replicas = std::move(replicas);
  report.last_failed_replica = last_failed;
  return report;
}

TEST(ReplicasReportTest, OneThatHasComeToTheEndIsEnough) {
  EXPECT_EQ(Ended({{0, 0}, {0, 0}}, -1).exit_code(), 0);
  EXPECT_EQ(Ended({{137, 0}, {0, 0}, {0, SIGKILL}}, 2).exit_code(), 0);
}

TEST(ReplicasReportTest, OtherwiseTheLastOneCounts) {
  EXPECT_EQ(Ended({{137, 0}, {3, 0}}, 0).exit_code(), 137);
  EXPECT_EQ(Ended({{137, 0}, {3, 0}}, 1).exit_code(), 3);
  EXPECT_EQ(Ended({{137, 0}, {0, SIGKILL}}, 1).exit_code(), 128 + SIGKILL);
}

TEST(ReplicasReportTest, WhatConcernsTheWholeJobComesFirst) {
  ReplicasReport report = Ended({{0, 0}, {3, 0}}, 1);
  report.output_errno = ENOSPC;
  EXPECT_EQ(report.exit_code(), 1);
  report.output_errno = 0;
  report.keeper_was_lost = true;
  EXPECT_EQ(report.exit_code(), 1);
  report.replicas = {{128 + SIGTERM, 0}, {128 + SIGTERM, 0}};
  report.interrupt_signal = SIGTERM;
  EXPECT_EQ(report.exit_code(), 128 + SIGTERM);
}

TEST(ReplicasReportTest, WhoeverWasToldToEndMayBeDoneOrFail) {
  for (const auto& [replicas, code] :
       std::vector<std::pair<std::vector<ProcessEnd>, int>>{
           {{{0, 0}, {143, 0}}, 0},
           {{{1, 0}, {143, 0}}, 143},
           {{{143, 0}, {1, 0}}, 1},
           {{{1, 0}, {0, SIGKILL}}, 143},
           {{{3, 0}, {1, 0}}, 1}}) {
    ReplicasReport report = Ended(replicas, 1);
    report.interrupt_signal = SIGTERM;
    EXPECT_EQ(report.exit_code(), code) << report.ToString();
  }
}

TEST(ReplicasReportTest, SaysWhatBecameOfEach) {
  ReplicasReport report = Ended({{0, 0}, {3, 0}, {0, 0}, {0, SIGKILL}}, 1);
  EXPECT_EQ(report.ToString(),
            "replicas 0, 2 exited with code 0; replica 1 exited with code 3; "
            "replica 3 killed by signal 9 (SIGKILL)");
  report.interrupt_signal = SIGINT;
  report.keeper_was_lost = true;
  report.output_errno = ENOSPC;
  EXPECT_EQ(report.ToString(),
            "interrupted by signal 2 (SIGINT); the keeper of the replicas had "
            "ended; replicas 0, 2 exited with code 0; replica 1 exited with "
            "code 3; replica 3 killed by signal 9 (SIGKILL); what they printed "
            "could not be written: No space left on device");
}

}  // namespace
}  // namespace fsdp::comm
