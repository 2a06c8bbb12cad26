#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/trainer.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

StepResult ResultOf(double loss) {
  StepResult result;
  result.loss = loss;
  result.grad_norm = 0.5;
  result.learning_rate = 1e-3;
  result.targets = 90;
  result.tokens = 100;
  return result;
}

TEST(ProgressTest, ShowsEachSoManyStepsAndTheLast) {
  std::ostringstream out;
  ProgressOptions options;
  options.steps = 5;
  options.every = 2;
  options.flops_per_token = 1e10;
  Progress progress(options, &out);
  ASSERT_OK(progress.Open());
  absl::Time now = absl::UnixEpoch();
  progress.Begin(now);
  for (int step = 1; step <= 5; ++step) {
    // The first step takes longer, which no rate counts.
    now += absl::Seconds(step == 1 ? 30 : 2);
    progress.Step(step, ResultOf(step), now);
  }
  EXPECT_OK(progress.Finish());
  EXPECT_EQ(out.str(),
            "step 2/5  loss 2.0000  grad 0.500  lr 1.00e-03  50 tokens/s  "
            "0.500 TFLOP/s  0:06 left\n"
            "step 4/5  loss 4.0000  grad 0.500  lr 1.00e-03  50 tokens/s  "
            "0.500 TFLOP/s  0:02 left\n"
            "step 5/5  loss 5.0000  grad 0.500  lr 1.00e-03  50 tokens/s  "
            "0.500 TFLOP/s  0:00 left\n");
}

TEST(ProgressTest, WritesALineOfJsonForEachStepAndMeasurement) {
  std::ostringstream out;
  ProgressOptions options;
  options.steps = 4;
  options.every = 100;
  options.metrics = ::testing::TempDir() + "/metrics.jsonl";
  { std::ofstream(options.metrics) << "{\"step\": 1}\n"; }
  Progress progress(options, &out);
  ASSERT_OK(progress.Open());
  progress.Begin(absl::UnixEpoch());
  progress.Step(2, ResultOf(1.25), absl::FromUnixSeconds(4));
  progress.Evaluated(2, 0.5);
  EXPECT_OK(progress.Finish());
  std::ifstream file(options.metrics);
  std::vector<Json> lines;
  for (std::string line; std::getline(file, line);) {
    const auto json = Json::Parse(line);
    ASSERT_OK(json);
    lines.push_back(*json);
  }
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(*lines[1].Find("step"), Json(2));
  EXPECT_EQ(lines[1].Find("loss")->NumberOr(0), 1.25);
  EXPECT_EQ(lines[1].Find("seconds")->NumberOr(0), 4);
  EXPECT_EQ(lines[1].Find("tokens_per_second")->NumberOr(0), 25);
  EXPECT_EQ(*lines[1].Find("targets"), Json(90));
  EXPECT_EQ(lines[1].Find("peak_allocated_mib"), nullptr);  // on the CPU
  EXPECT_EQ(lines[2].Find("eval_loss")->NumberOr(0), 0.5);
  EXPECT_EQ(lines[2].Find("perplexity")->NumberOr(0), std::exp(0.5));
  EXPECT_THAT(out.str(), HasSubstr("step 2: evaluation loss 0.5000"));
}

TEST(ProgressTest, AFileThatCannotBeWrittenIsNamed) {
  ProgressOptions options;
  options.metrics = "/no/such/folder/metrics.jsonl";
  std::ostringstream out;
  EXPECT_THAT(Progress(options, &out).Open(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "--metrics=/no/such/folder/metrics.jsonl: No such file "
                       "or directory"));
}

TEST(ProgressTest, AFullDiskIsSaid) {
  ProgressOptions options;
  options.metrics = "/dev/full";
  std::ostringstream out;
  Progress progress(options, &out);
  ASSERT_OK(progress.Open());
  progress.Begin(absl::UnixEpoch());
  progress.Step(1, ResultOf(1), absl::FromUnixSeconds(1));
  EXPECT_THAT(progress.Finish(), StatusIs(absl::StatusCode::kResourceExhausted,
                                          HasSubstr("/dev/full")));
}

TEST(ClockTest, HasHoursWhereThereAreSome) {
  EXPECT_EQ(Clock(absl::Seconds(9)), "0:09");
  EXPECT_EQ(Clock(absl::Minutes(59) + absl::Seconds(1)), "59:01");
  EXPECT_EQ(Clock(absl::Hours(2) + absl::Seconds(9)), "2:00:09");
}

// Llama 3 8B has 8.03e9 parameters, of which 128,256 x 4096 are the embedding
// and 4096 x 65 the norms.
TEST(FlopsTest, CountsTheWeightsOfLlama38B) {
  LlamaConfig config{};
  config.vocab_size = 128256;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = 32;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  const double weights = 8030261248.0 - 128256.0 * 4096 - 65.0 * 4096;
  const double attention = 12.0 * 32 * 32 * 128 * 8192;
  EXPECT_EQ(FlopsPerToken(config, 8192, /*frozen_base=*/false),
            6 * weights + attention);
  EXPECT_EQ(FlopsPerToken(config, 8192, /*frozen_base=*/true),
            4 * weights + attention);
}

}  // namespace
}  // namespace llama
