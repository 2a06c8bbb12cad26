// How good fsdp::ChooseOptions() is on this machine: all that it considers is
// trained, in turns, and what it has chosen is held against the fastest, and
// against the memory that was measured.
//   ./bazelw run -c opt //benchmarks:choice_benchmark -- RANKS
// Ranks are processes of one thread that share memory. A line for each model
// and amount of memory: milliseconds of a step of the choice and of the fastest
// that fits, by their medians and what ChooseOptions() has said of the choice,
// and measured over planned bytes, of the memory plan and of activations.
// Then the grid.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/scalars.h"
#include "examples/gpt/flags/options.h"
#include "examples/gpt/model/model.h"
#include "fsdp/choose/candidates.h"
#include "fsdp/choose/choose_options.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/testing/memory_meter.h"

namespace fsdp {
namespace {

using Ranks = std::shared_ptr<comm::Communicator>;

constexpr int kRounds = 9;
constexpr double kMiB = 1 << 20;

struct Case {
  const char* name;
  gpt::GptConfig model;
  int64_t batch;
};

// Mostly compute; mostly optimizer and communication; many small units.
const Case kCases[] = {
    {"compute", {256, 256, 6, 4, 128}, 4},
    {"parameters", {256, 512, 4, 8, 32}, 1},
    {"small units", {256, 128, 16, 4, 64}, 2},
};

at::Tensor Tokens(const Case& c, int64_t rows) {
  return at::randint(c.model.vocab, {rows, c.model.seq}, at::kLong);
}

gpt::Gpt MakeGpt(const Case& c) {
  const DeferredInit deferred;
  return gpt::Gpt(c.model);
}

absl::StatusOr<AutoChoice> Choose(const Case& c, const Ranks& ranks,
                                  int64_t memory_bytes) {
  const gpt::Gpt net = MakeGpt(c);
  AutoOptions wanted;
  wanted.memory_bytes = memory_bytes;
  wanted.rows = c.batch;
  wanted.loss = [&](int64_t rows) {
    const at::Tensor tokens = Tokens(c, rows);
    return gpt::NextTokenLoss(net.ptr()->forward(tokens), tokens);
  };
  wanted.base.wrap_policy = WrapModules<gpt::BlockImpl>();
  return ChooseOptions(net.ptr(), ranks, wanted);
}

// What a candidate is made of, by the words that it is described by.
Options OptionsOf(const Candidate& candidate) {
  Options options;
  if (candidate.units != "root alone") {
    options.wrap_policy = WrapModules<gpt::BlockImpl>();
  }
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
        ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard}) {
    if (candidate.strategy == ToString(strategy)) {
      options.unit.strategy = strategy;
    }
  }
  options.prefetch = {candidate.prefetch, candidate.prefetch};
  if (candidate.recompute) options.recompute.units = EveryUnit();
  return options;
}

// A candidate that is trained.
class Training {
 public:
  static absl::StatusOr<Training> Make(const Case& c, const Ranks& ranks,
                                       const Candidate& candidate) {
    Training training;
    FSDP_ASSIGN_OR_RETURN(training.model_,
                          FullyShard(MakeGpt(c), ranks, OptionsOf(candidate)));
    training.optimizer_ =
        std::make_unique<FusedAdamW>(training.model_->Parameters());
    training.tokens_ = Tokens(c, c.batch);
    return training;
  }

  absl::Status Step() {
    FSDP_RETURN_IF_ERROR(model_->Backward(
        gpt::NextTokenLoss(model_->forward(tokens_), tokens_)));
    optimizer_->step();
    optimizer_->zero_grad();
    return absl::OkStatus();
  }

  // Of the slowest rank.
  absl::Status Time(comm::Communicator& ranks) {
    FSDP_RETURN_IF_ERROR(
        comm::Barrier(ranks, "a step", absl::Now() + absl::Minutes(1)));
    FSDP_RETURN_IF_ERROR(Step());
    const absl::Time begin = absl::Now();
    FSDP_RETURN_IF_ERROR(Step());
    const double own = absl::ToDoubleSeconds(absl::Now() - begin);
    FSDP_ASSIGN_OR_RETURN(const double slowest, comm::Max(ranks, own));
    seconds_.push_back(slowest);
    return absl::OkStatus();
  }

  double Median() {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_[seconds_.size() / 2];
  }

  // Of the kinds of the memory plan, measured.
  int64_t PlannedKinds() {
    int64_t bytes = 0;
    for (const NamedShard& named : model_->NamedShards()) {
      bytes += static_cast<int64_t>(named.shard.nbytes());
    }
    // Gradients and states are as large each.
    bytes *= 4;
    const MemoryStats stats = model_->memory_stats();
    return bytes + stats.parameters.peak_in_use_bytes +
           stats.gradients.peak_in_use_bytes;
  }

  // What comes and goes in a step.
  absl::StatusOr<int64_t> Activations() {
    const auto meter = std::make_shared<testing::MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    FSDP_RETURN_IF_ERROR(Step());
    return meter->peak();
  }

 private:
  FullyShardedDataParallel<gpt::GptImpl> model_{nullptr};
  std::unique_ptr<FusedAdamW> optimizer_;
  at::Tensor tokens_;
  std::vector<double> seconds_;
};

absl::Status Report(const Case& c, const Ranks& ranks, const AutoChoice& choice,
                    std::vector<Training>& trainings) {
  const auto& considered = choice.considered;
  double best = 0;
  size_t fastest = 0;
  for (size_t i = 0; i < trainings.size(); ++i) {
    const double seconds = trainings[i].Median();
    if (!considered[i].Fits(choice.memory_bytes)) continue;
    if (best == 0 || seconds < best) best = seconds, fastest = i;
  }
  Training& chosen = trainings[choice.chosen];
  const Candidate& said = considered[choice.chosen];
  FSDP_ASSIGN_OR_RETURN(const int64_t activations, chosen.Activations());
  if (ranks->rank() != 0) return absl::OkStatus();
  absl::PrintF(
      "%s, %d ranks, %.1f MiB: %.2f ms, the fastest %.2f ms, ratio %.3f; "
      "predicted %.2f ms; measured over planned: plan %.3f, activations %.3f, "
      "together %.3f\n",
      c.name, ranks->world_size(),
      static_cast<double>(choice.memory_bytes) / kMiB, 1e3 * chosen.Median(),
      1e3 * best, chosen.Median() / best, 1e3 * said.seconds,
      static_cast<double>(chosen.PlannedKinds()) / said.plan.total(),
      static_cast<double>(activations) / said.activations,
      static_cast<double>(chosen.PlannedKinds() + activations) / said.bytes());
  for (size_t i = 0; i < trainings.size(); ++i) {
    const Candidate& each = considered[i];
    absl::PrintF("  %-12s %-30s %s%s %8.2f ms, predicted %8.2f ms%s%s%s\n",
                 each.units, each.strategy,
                 each.prefetch ? "prefetch " : "         ",
                 each.recompute ? "recompute" : "         ",
                 1e3 * trainings[i].Median(), 1e3 * each.seconds,
                 each.Fits(choice.memory_bytes) ? "" : " (too large)",
                 i == fastest ? " fastest" : "",
                 static_cast<int>(i) == choice.chosen ? " chosen" : "");
  }
  return absl::OkStatus();
}

// With plenty of memory, and with as little as makes recomputation necessary.
absl::Status Run(const Case& c, const Ranks& ranks) {
  FSDP_ASSIGN_OR_RETURN(AutoChoice rich, Choose(c, ranks, int64_t{1} << 40));
  int64_t smallest_kept = rich.memory_bytes;
  for (const Candidate& each : rich.considered) {
    if (!each.recompute) smallest_kept = std::min(smallest_kept, each.bytes());
  }
  FSDP_ASSIGN_OR_RETURN(AutoChoice poor, Choose(c, ranks, smallest_kept - 1));
  std::vector<Training> trainings;
  for (const Candidate& candidate : rich.considered) {
    FSDP_ASSIGN_OR_RETURN(trainings.emplace_back(),
                          Training::Make(c, ranks, candidate));
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Training& training : trainings) {
      FSDP_RETURN_IF_ERROR(training.Time(*ranks));
    }
  }
  FSDP_RETURN_IF_ERROR(Report(c, ranks, rich, trainings));
  return Report(c, ranks, poor, trainings);
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  return fsdp::comm::RunRanks(argc, argv, ranks,
                              [](const fsdp::Ranks& group) -> absl::Status {
                                at::set_num_threads(1);
                                for (const fsdp::Case& c : fsdp::kCases) {
                                  FSDP_RETURN_IF_ERROR(fsdp::Run(c, group));
                                }
                                return absl::OkStatus();
                              });
}
