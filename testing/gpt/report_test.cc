#include "testing/gpt/report.h"

#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::Json;
using ::testing::IsSupersetOf;

Report MakeReport() {
  Report report;
  report.options.batch = 4;
  report.options.model.seq = 50;
  report.world = 2;
  report.num_parameters = 1000;
  report.losses = {5, 4, 3, 2};
  report.loss_rank0 = {5.5, 4.5, 3.5, 2.5};
  report.step_seconds = {0.4, 0.1, 0.3};
  report.peak_rss_mb = {300, 310};
  report.collectives = {15, 6, 3'000'000, 1'500'000};
  return report;
}

TEST(ReportTest, JsonHasTheKeysOfThePeerAndOurs) {
  const Json json = ToJson(MakeReport(), /*of_steps=*/true);
  std::set<std::string> keys;
  for (const auto& [key, value] : *json.As<Json::Object>()) keys.insert(key);
  EXPECT_THAT(
      keys, IsSupersetOf({"impl", "world", "params", "batch", "seq", "step_ms",
                          "min_ms", "tok_s", "peak_rss_mb", "loss0", "loss"}));
  EXPECT_EQ(json.Find("step_ms")->NumberOr(0), 300);
  EXPECT_EQ(json.Find("min_ms")->NumberOr(0), 100);
  EXPECT_EQ(json.Find("tok_s")->NumberOr(0), 2 * 4 * 50 / 0.3);
  EXPECT_EQ(json.Find("loss0")->NumberOr(0), 5.5);
  EXPECT_EQ(json.Find("loss")->NumberOr(0), 2.5);
  EXPECT_EQ(json.Find("losses")->ToString(), "[5.0, 4.0, 3.0, 2.0]");
  EXPECT_EQ(json.Find("peak_rss_mb")->ToString(), "[300, 310]");
  EXPECT_EQ(json.Find("all_gathers")->NumberOr(0), 15);
  EXPECT_EQ(json.Find("bytes_reduced")->NumberOr(0), 1'500'000);
}

// A run that had finished before takes no step.
TEST(ReportTest, WhatIsNotKnownWithoutAStepIsNull) {
  Report report = MakeReport();
  report.losses.clear();
  report.loss_rank0.clear();
  report.step_seconds.clear();
  report.collectives = {};
  const Json json = ToJson(report, /*of_steps=*/true);
  for (const char* key : {"step_ms", "min_ms", "tok_s", "loss0", "loss"}) {
    EXPECT_EQ(*json.Find(key), Json()) << key;
  }
  EXPECT_EQ(json.Find("losses")->ToString(), "[]");
}

Report MakeOffloadedReport() {
  Report report = MakeReport();
  OffloadReport& offload = report.offload.emplace();
  offload.plan.bytes[0] = {/*device=*/1000, /*cpu=*/0, /*ssd=*/3000};
  offload.plan.bytes[2] = {/*device=*/0, /*cpu=*/500, /*ssd=*/0};
  offload.plan.buffer_bytes = 70;
  offload.plan.budget = 1200;
  offload.bytes_read = {9'000'000, 0, 3'000'000};
  offload.bytes_written = {600'000, 300'000, 1};
  offload.waited_seconds = {0.3, 0.45};
  return report;
}

TEST(ReportTest, SaysWhereStatesRestAndWhatMovedInAStep) {
  const Json json = ToJson(MakeOffloadedReport(), /*of_steps=*/false);
  EXPECT_EQ(json.Find("offload")->ToString(),
            R"({"parameters": {"device": 1000, "cpu": 0, "ssd": 3000}, )"
            R"("gradients": {"device": 0, "cpu": 0, "ssd": 0}, )"
            R"("optimizer": {"device": 0, "cpu": 500, "ssd": 0}, )"
            R"("buffers": 70, "memory_budget": 1200, )"
            R"("read_per_step": {"parameters": 3e+06, "gradients": 0.0, )"
            R"("optimizer": 1e+06}, )"
            R"("written_per_step": {"parameters": 2e+05, )"
            R"("gradients": 1e+05, "optimizer": 0.3333333333333333}, )"
            R"("waited_seconds_per_step": [0.09999999999999999, 0.15]})");
  const Json json_of_run = ToJson(MakeReport(), /*of_steps=*/false);
  EXPECT_EQ(json_of_run.Find("offload"), nullptr);
  EXPECT_EQ(json_of_run.Find("losses"), nullptr);
}

}  // namespace
}  // namespace gpt
