// Shows how good fsdp::ChooseOptions() is on this machine. In each iteration
// all candidates that fit train a step, in turns, and the choice is compared
// with the fastest one by their medians. Ranks are threads that share memory;
// the argument says how many. Memory is plentiful, or a byte less than it
// takes without recomputation. Counters:
// - `ratio_to_best`: time of a step of the choice over that of the fastest;
// - `predicted_ms`: the prediction of ChooseOptions() for the choice;
// - `of_plan`: measured over planned bytes of shards, optimizer, gathered
//   parameters and gradients; `of_bytes`: of those and activations. At 1 rank
//   both are upper bounds: a gradient is there only until the optimizer has
//   used it.
//   ./bazelw run -c opt //benchmarks:choice_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_error.h"
#include "benchmark/benchmark.h"
#include "benchmarks/rank_threads.h"
#include "comm/communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/memory_meter.h"
#include "planner/choose/candidates.h"
#include "planner/choose/choose_options.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/model.h"

namespace fsdp {
namespace {

using Group = std::vector<std::shared_ptr<comm::Communicator>>;

struct Case {
  gpt::GptConfig model;
  int64_t batch;
};

enum class Memory { kPlenty, kScarce };

Group MakeGroup(int ranks) {
  Group group(ranks);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  OnAllRanks(ranks, [&](int rank) {
    group[rank] =
        ValueOrThrow(comm::CreateSharedMemoryCommunicator(store, rank, ranks));
  });
  return group;
}

at::Tensor Tokens(const Case& c, int64_t rows) {
  return at::randint(c.model.vocab, {rows, c.model.seq}, at::kLong);
}

gpt::Gpt MakeGpt(const Case& c) {
  const DeferredInit deferred;
  return gpt::Gpt(c.model);
}

AutoChoice Choose(const Case& c,
                  const std::shared_ptr<comm::Communicator>& ranks,
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
  return ValueOrThrow(ChooseOptions(net.ptr(), ranks, wanted));
}

AutoChoice ChooseFor(const Case& c, Memory memory,
                     const std::shared_ptr<comm::Communicator>& ranks) {
  AutoChoice choice = Choose(c, ranks, int64_t{1} << 40);
  if (memory == Memory::kPlenty) return choice;
  int64_t smallest_kept = choice.memory_bytes;
  for (const Candidate& each : choice.considered) {
    if (!each.recompute) smallest_kept = std::min(smallest_kept, each.bytes());
  }
  return Choose(c, ranks, smallest_kept - 1);
}

// Returns the options that the words of a candidate describe.
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

std::string NameOf(const Candidate& candidate) {
  return absl::StrCat(candidate.units, ", ", candidate.strategy,
                      candidate.prefetch ? ", prefetch" : "",
                      candidate.recompute ? ", recompute" : "");
}

// Trains a candidate on one rank.
class Training {
 public:
  Training(const Case& c, std::shared_ptr<comm::Communicator> ranks,
           const Candidate& candidate)
      : ranks_(ranks->world_size()),
        model_(ValueOrThrow(
            FullyShard(MakeGpt(c), std::move(ranks), OptionsOf(candidate)))),
        optimizer_(model_->Parameters()),
        tokens_(Tokens(c, c.batch)) {}

  void Step() {
    ThrowIfError(model_->Backward(
        gpt::NextTokenLoss(model_->forward(tokens_), tokens_)));
    optimizer_.step();
    optimizer_.zero_grad();
  }

  // Returns the bytes of this rank's gradients.
  int64_t GradientBytes() const {
    int64_t bytes = 0;
    for (const TensorRange& named : model_->Ranges()) {
      bytes += static_cast<int64_t>(named.values.nbytes());
    }
    return bytes;
  }

  // Returns the measured bytes of what the memory plan counts.
  int64_t PlannedKinds() const {
    const MemoryStats stats = model_->memory_stats();
    // Parameters and two states are as large as the gradients.
    return 4 * GradientBytes() + stats.parameters.peak_in_use_bytes +
           stats.gradients.peak_in_use_bytes;
  }

  // Returns the most bytes that come and go in a step.
  int64_t Activations() {
    const auto meter = std::make_shared<testing::MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    Step();
    // A rank that is alone keeps the gradients that autograd has made.
    return meter->peak() - (ranks_ == 1 ? GradientBytes() : 0);
  }

 private:
  const int ranks_;
  FullyShardedDataParallel<gpt::GptImpl> model_;
  FusedAdamW optimizer_;
  at::Tensor tokens_;
};

// Trains a candidate on all ranks and keeps how long its steps took.
class Contestant {
 public:
  Contestant(const Case& c, const Group& group, const Candidate& candidate)
      : ranks_(group.size()) {
    OnAllRanks(size(), [&](int rank) {
      ranks_[rank] = std::make_unique<Training>(c, group[rank], candidate);
    });
    Step();
  }

  // Returns the seconds of the slowest rank. The first step brings this
  // candidate's memory back into the caches.
  double TimeStep() {
    Step();
    const absl::Time begin = absl::Now();
    Step();
    seconds_.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
    return seconds_.back();
  }

  double Median() const {
    std::vector<double> sorted = seconds_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

  int64_t PlannedKinds() const { return ranks_[0]->PlannedKinds(); }

  // Returns what rank 0 measures.
  int64_t Activations() {
    int64_t bytes = 0;
    OnAllRanks(size(), [&](int rank) {
      const int64_t own = ranks_[rank]->Activations();
      if (rank == 0) bytes = own;
    });
    return bytes;
  }

 private:
  int size() const { return static_cast<int>(ranks_.size()); }
  void Step() {
    OnAllRanks(size(), [this](int rank) { ranks_[rank]->Step(); });
  }

  std::vector<std::unique_ptr<Training>> ranks_;
  std::vector<double> seconds_;
};

// Has all candidates that fit.
class Contest {
 public:
  Contest(const Case& c, Memory memory, const Group& group) {
    OnAllRanks(static_cast<int>(group.size()), [&](int rank) {
      AutoChoice own = ChooseFor(c, memory, group[rank]);
      if (rank == 0) choice_ = std::move(own);
    });
    for (const Candidate& each : choice_.considered) {
      if (!each.Fits(choice_.memory_bytes)) continue;
      if (&each == &choice_.considered[choice_.chosen]) chosen_ = said_.size();
      said_.push_back(&each);
      contestants_.emplace_back(c, group, each);
    }
  }

  // Runs a step of each, and returns the seconds of the choice.
  double Turn() {
    double seconds = 0;
    for (size_t i = 0; i < contestants_.size(); ++i) {
      const double own = contestants_[i].TimeStep();
      if (i == chosen_) seconds = own;
    }
    return seconds;
  }

  void Report(benchmark::State& state) {
    const size_t fastest =
        std::min_element(contestants_.begin(), contestants_.end(),
                         [](const Contestant& a, const Contestant& b) {
                           return a.Median() < b.Median();
                         }) -
        contestants_.begin();
    const double best = contestants_[fastest].Median();
    Contestant& chosen = contestants_[chosen_];
    const Candidate& said = *said_[chosen_];
    const auto planned = static_cast<double>(chosen.PlannedKinds());
    const auto activations = static_cast<double>(chosen.Activations());
    state.counters["ms"] = 1e3 * chosen.Median();
    state.counters["best_ms"] = 1e3 * best;
    state.counters["ratio_to_best"] = chosen.Median() / best;
    state.counters["predicted_ms"] = 1e3 * said.seconds;
    state.counters["of_plan"] =
        planned / static_cast<double>(said.plan.total());
    state.counters["of_bytes"] =
        (planned + activations) / static_cast<double>(said.bytes());
    state.counters["fit"] = static_cast<double>(said_.size());
    state.SetLabel(absl::StrCat("chosen: ", NameOf(said),
                                "; fastest: ", NameOf(*said_[fastest])));
  }

 private:
  AutoChoice choice_;
  std::vector<const Candidate*> said_;
  std::vector<Contestant> contestants_;
  size_t chosen_ = 0;
};

void BM_Choice(benchmark::State& state, const Case& c, Memory memory) {
  const Group group = MakeGroup(static_cast<int>(state.range(0)));
  Contest contest(c, memory, group);
  for (auto _ : state) state.SetIterationTime(contest.Turn());
  contest.Report(state);
}

void Ranks(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("ranks")->Arg(1)->Arg(2)->UseManualTime()->Unit(
      benchmark::kMillisecond);
}

// The cases mostly compute, mostly step and communicate, or have small units.
const Case kCompute = {{256, 256, 6, 4, 128}, 4};
const Case kParameters = {{256, 512, 4, 8, 32}, 1};
const Case kSmallUnits = {{256, 128, 16, 4, 64}, 2};

BENCHMARK_CAPTURE(BM_Choice, compute, kCompute, Memory::kPlenty)->Apply(Ranks);
BENCHMARK_CAPTURE(BM_Choice, compute_scarce, kCompute, Memory::kScarce)
    ->Apply(Ranks);
BENCHMARK_CAPTURE(BM_Choice, parameters, kParameters, Memory::kPlenty)
    ->Apply(Ranks);
BENCHMARK_CAPTURE(BM_Choice, parameters_scarce, kParameters, Memory::kScarce)
    ->Apply(Ranks);
BENCHMARK_CAPTURE(BM_Choice, small_units, kSmallUnits, Memory::kPlenty)
    ->Apply(Ranks);
BENCHMARK_CAPTURE(BM_Choice, small_units_scarce, kSmallUnits, Memory::kScarce)
    ->Apply(Ranks);

}  // namespace
}  // namespace fsdp
