// Replicas whose ranks are threads, which come and go: against a plain model
// that knows who finished which step, and against each other to the bit.
#include "replicas/joined_replica.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"
#include "replicas/testing/replica_threads.h"

namespace fsdp::replicas::testing {
namespace {

using ::fsdp::testing::FreePath;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;

constexpr int64_t kComparableSteps = 500;

int IndexOf(const ReplicaId& id, const std::vector<ReplicaId>& ids) {
  return static_cast<int>(std::find(ids.begin(), ids.end(), id) - ids.begin());
}

// Returns what one process that knows no replicas makes of the same data.
std::map<std::string, at::Tensor> TrainPlain(
    const std::map<int64_t, StepRecord>& steps, int ranks) {
  const std::shared_ptr<NetImpl> net =
      MakeNet(kDim, kBlocks, SeedOf(steps.at(0).began.front()));
  torch::optim::AdamW optimizer(net->parameters(),
                                torch::optim::AdamWOptions(0.01));
  for (const auto& [step, record] : steps) {
    optimizer.zero_grad();
    const auto parts = static_cast<double>(record.finished.size() * ranks);
    for (const ReplicaId& id : record.finished) {
      for (int rank = 0; rank < ranks; ++rank) {
        const at::Tensor x =
            RowsOf(step, IndexOf(id, record.began),
                   static_cast<int>(record.began.size()), rank, ranks);
        (Loss(net->forward(x), x) / parts).backward();
      }
    }
    optimizer.step();
  }
  std::map<std::string, at::Tensor> parameters;
  for (const auto& item : net->named_parameters()) {
    parameters[item.key()] = item.value().detach();
  }
  return parameters;
}

std::string Describe(const std::map<int64_t, StepRecord>& steps) {
  std::string text;
  const auto names = [&text](const std::vector<ReplicaId>& ids) {
    for (const ReplicaId& id : ids) absl::StrAppend(&text, " ", ToString(id));
  };
  for (const auto& [step, record] : steps) {
    absl::StrAppend(&text, "step ", step, ": begun by");
    names(record.began);
    absl::StrAppend(&text, ", finished by");
    names(record.finished);
    absl::StrAppend(&text, "\n");
  }
  return text;
}

// Every step was finished once, by replicas that agree to the bit, and the
// model is what it has to be.
void ExpectRight(const ThreadsOptions& options, const ThreadsResult& result) {
  SCOPED_TRACE(Describe(result.steps));
  ASSERT_OK(result.status);
  ASSERT_EQ(static_cast<int64_t>(result.steps.size()), options.steps);
  for (int64_t step = 0; step < options.steps; ++step) {
    ASSERT_EQ(result.steps.count(step), 1) << step;
  }
  // In the long run rounding decides.
  if (options.steps > kComparableSteps) return;
  const auto plain = TrainPlain(result.steps, options.ranks);
  ASSERT_EQ(plain.size(), result.parameters.size());
  for (const auto& [name, value] : plain) {
    const at::Tensor off = (result.parameters.at(name) - value).abs().max();
    EXPECT_LT(off.item<double>(), 1e-5) << name;
  }
}

TEST(JoinedReplicaTest, AReplicaThatIsLostAtAnyMomentComesBack) {
  for (int moment = 0; moment < kNumMoments; ++moment) {
    for (const End end : {End::kLeaves, End::kDies}) {
      SCOPED_TRACE(absl::StrCat("moment ", moment, ", ",
                                end == End::kDies ? "dies" : "leaves"));
      ThreadsOptions options;
      options.steps = 12;
      options.losses = {{3, 1, 1, static_cast<Moment>(moment), end},
                        {6, 0, 0, static_cast<Moment>(moment), end}};
      const ThreadsResult result = TrainReplicas(options);
      ExpectRight(options, result);
      EXPECT_GE(result.losses, 1);
    }
  }
}

TEST(JoinedReplicaTest, WithEveryStrategy) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    ThreadsOptions options;
    options.replicas = 3;
    options.steps = 12;
    options.sharding = fsdp::testing::BlockUnits();
    options.sharding.unit.strategy = strategy;
    options.losses = {{2, 2, 0, Moment::kAfterBackward, End::kDies},
                      {6, 0, 1, Moment::kBeforeVote, End::kLeaves}};
    ExpectRight(options, TrainReplicas(options));
  }
}

// Checks that the same replicas took the same steps with the same bits.
void ExpectSame(const ThreadsResult& a, const ThreadsResult& b) {
  ASSERT_OK(a.status);
  ASSERT_OK(b.status);
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (const auto& [step, record] : a.steps) {
    const StepRecord& other = b.steps.at(step);
    ASSERT_EQ(record.began, other.began) << step;
    ASSERT_EQ(record.finished, other.finished) << step;
    // Not all that ended after the step have written it down.
    for (const auto& [replica, values] : record.values) {
      const auto theirs = other.values.find(replica);
      if (theirs == other.values.end()) continue;
      for (size_t rank = 0; rank < values.size(); ++rank) {
        if (values[rank].empty() || theirs->second[rank].empty()) continue;
        ASSERT_TRUE(values[rank] == theirs->second[rank]) << step;
      }
    }
  }
}

// Has so many losses, each at any moment, and then does as the history says.
TEST(JoinedReplicaTest, ManyLossesAndTheirReplay) {
  const char* const wanted = std::getenv("REPLICA_LOSSES");
  const int losses = wanted == nullptr ? 20 : std::atoi(wanted);
  std::mt19937 random(7);
  ThreadsOptions options;
  options.loss_timeout = absl::Milliseconds(500);
  options.steps = int64_t{20} * losses;
  for (int i = 0; i < losses; ++i) {
    options.losses.push_back({int64_t{15} * i, static_cast<int>(random() % 2),
                              static_cast<int>(random() % 2),
                              static_cast<Moment>(random() % kNumMoments),
                              static_cast<End>(random() % 2)});
  }
  options.history_folder = FreePath("history");
  const ThreadsResult result = TrainReplicas(options);
  ExpectRight(options, result);
  RecordProperty("losses", result.losses);
  EXPECT_GE(result.losses, losses * 3 / 4);
  options.losses.clear();
  options.replay = std::exchange(options.history_folder, "");
  ExpectSame(TrainReplicas(options), result);
}

}  // namespace
}  // namespace fsdp::replicas::testing
