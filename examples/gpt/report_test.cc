#include "examples/gpt/report.h"

#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::Json;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

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
  const Json json = ToJson(MakeReport());
  std::set<std::string> keys;
  for (const auto& [key, value] : *json.As<Json::Object>()) keys.insert(key);
  EXPECT_THAT(keys, IsSupersetOf({"impl", "world", "params", "bf16", "batch",
                                  "seq", "step_ms", "min_ms", "tok_s",
                                  "peak_rss_mb", "loss0", "loss"}));
  EXPECT_EQ(json.Find("step_ms")->NumberOr(0), 300);
  EXPECT_EQ(json.Find("min_ms")->NumberOr(0), 100);
  EXPECT_EQ(json.Find("tok_s")->NumberOr(0), 2 * 4 * 50 / 0.3);
  EXPECT_EQ(json.Find("loss0")->NumberOr(0), 5.5);
  EXPECT_EQ(json.Find("loss")->NumberOr(0), 2.5);
  EXPECT_EQ(json.Find("losses")->ToString(), "[5.0, 4.0, 3.0, 2.0]");
  EXPECT_EQ(json.Find("peak_rss_mb")->ToString(), "[300, 310]");
  EXPECT_EQ(json.Find("all_gathers")->NumberOr(0), 15);
  EXPECT_EQ(json.Find("bytes_reduced")->NumberOr(0), 1'500'000);
  EXPECT_EQ(json.Find("validation_loss"), nullptr);
}

TEST(ReportTest, TableIsForPeople) {
  Report report = MakeReport();
  EXPECT_THAT(ToTable(report), Not(HasSubstr("validation")));
  report.validation_loss = 1.875;
  EXPECT_EQ(ToTable(report),
            "4 steps on 2 ranks, 1000 parameters\n"
            "  training loss    2.000, at first 5.000 (nats per token)\n"
            "  validation loss  1.875\n"
            "  step, median     300.0 ms\n"
            "  tokens/s         1333\n"
            "  peak memory      300, 310 MB, by rank\n"
            "  per step         5 all-gathers (1.0 MB), 2 reduce-scatters "
            "(0.5 MB)\n");
}

}  // namespace
}  // namespace gpt
