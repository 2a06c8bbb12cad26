// Shows what replicas cost: two of one rank each, threads of this process that
// share memory as processes of one host do, and a keeper.
// - `finish` is FinishStep() for gradients of so many MB. `votes_ms` of it is
//   what it takes with next to no gradients: two messages to the keeper, and
//   waiting for the slower one. `of_all_reduce`: the time of an all-reduce of
//   as many bytes by the same backend, in the same run, over that of
//   FinishStep(), which copies the gradients first and writes the means last.
// - `join` is how long a replica waits that is given a model of so many MB with
//   the two states of AdamW; the others wait as long. `GB/s`, and
//   `of_broadcast`: the time of a broadcast of as many bytes in one tensor over
//   it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/chain.h"
#include "benchmarks/measure.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/connect_ranks.h"
#include "replicas/replicas.h"
#include "replicas/testing/test_keeper.h"

namespace fsdp {
namespace {

constexpr int kReplicas = 2;
constexpr absl::Duration kTimeout = absl::Minutes(2);
constexpr int64_t kMegabyte = 1'000'000;

// Has layers of a megabyte of parameters, unsharded: what one rank holds.
struct Training {
  explicit Training(int64_t megabytes)
      : net(MakeChain<torch::nn::LinearImpl>(
            static_cast<int>(megabytes),
            torch::nn::LinearOptions(500, 500).bias(false))) {
    optimizer = std::make_unique<torch::optim::AdamW>(
        net->parameters(), torch::optim::AdamWOptions(1e-3));
    run.model = net.get();
    run.optimizer = optimizer.get();
    run.random_state = false;
    for (at::Tensor& parameter : net->parameters()) {
      parameter.mutable_grad() = at::ones(parameter.sizes());
    }
  }

  const std::shared_ptr<torch::nn::SequentialImpl> net;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  checkpoint::TrainingRun run;
};

// Returns the seconds of `steps` steps of replica 0, without the first ones,
// which allocate memory.
std::vector<double> FinishSeconds(int64_t megabytes, int64_t steps) {
  const replicas::testing::TestKeeper keeper;
  std::vector<double> seconds;
  OnAllRanks(kReplicas, [&](int replica) {
    Training training(megabytes);
    ReplicaOptions options;
    options.steps = steps + 2;
    const auto replicas = ValueOrThrow(Replicas::Join(
        keeper.EnvironmentOf(replica, kReplicas), &training.run, options));
    while (const auto step = ValueOrThrow(replicas->BeginStep())) {
      const double of_step =
          Seconds([&] { ThrowIfError(replicas->FinishStep()); });
      if (replica == 0 && step->step >= 2) seconds.push_back(of_step);
    }
  });
  return seconds;
}

using Collective = std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
    comm::Communicator& ranks, const at::Tensor& tensor)>;

double CollectiveSeconds(int64_t megabytes, const Collective& start) {
  const auto group =
      ValueOrThrow(comm::testing::CreateSharedMemoryGroup(kReplicas, kTimeout));
  std::vector<double> seconds;
  OnAllRanks(kReplicas, [&](int rank) {
    const at::Tensor tensor =
        ValueOrThrow(group[rank]->AllocateSymmetric(megabytes * kMegabyte))
            .zero_()
            .view(at::kFloat);
    for (int i = 0; i < 7; ++i) {
      const double once = Seconds([&] {
        ThrowIfError(ValueOrThrow(start(*group[rank], tensor))
                         ->Wait(absl::Now() + kTimeout));
      });
      if (rank == 0 && i >= 2) seconds.push_back(once);
    }
  });
  return Median(std::move(seconds));
}

void BM_Finish(benchmark::State& state) {
  const int64_t megabytes = state.range(0);
  const double all_reduce = CollectiveSeconds(
      megabytes, [](comm::Communicator& ranks, const at::Tensor& tensor) {
        return ranks.AllReduce(tensor, comm::ReduceOp::kSum, "plain");
      });
  const std::vector<double> seconds =
      FinishSeconds(megabytes, static_cast<int64_t>(state.max_iterations));
  size_t step = 0;
  for (auto _ : state) state.SetIterationTime(seconds.at(step++));
  state.counters["of_all_reduce"] = all_reduce / Median(seconds);
  state.counters["votes_ms"] = 1e3 * Median(FinishSeconds(1, 20));
}

// Returns how long BeginStep() of a replica without the state takes to get it.
double JoinSeconds(int64_t megabytes) {
  const replicas::testing::TestKeeper keeper;
  double seconds = 0;
  OnAllRanks(kReplicas, [&](int replica) {
    Training training(megabytes);
    if (replica == 0) training.optimizer->step();  // makes its states
    ReplicaOptions options;
    options.steps = 2;
    options.first_step = replica == 0 ? 1 : 0;
    const auto replicas = ValueOrThrow(Replicas::Join(
        keeper.EnvironmentOf(replica, kReplicas), &training.run, options));
    const double waited = Seconds([&] { ValueOrThrow(replicas->BeginStep()); });
    if (replica == 1) seconds = waited;
    ThrowIfError(replicas->FinishStep());
    ValueOrThrow(replicas->BeginStep());
  });
  return seconds;
}

void BM_Join(benchmark::State& state) {
  const int64_t megabytes = state.range(0);
  const int64_t all = 3 * megabytes;  // with AdamW's states
  const double broadcast = CollectiveSeconds(
      all, [](comm::Communicator& ranks, const at::Tensor& tensor) {
        return ranks.Broadcast(tensor, /*root=*/0, "plain");
      });
  std::vector<double> seconds;
  for (auto _ : state) {
    seconds.push_back(JoinSeconds(megabytes));
    state.SetIterationTime(seconds.back());
  }
  const double median = Median(seconds);
  state.counters["GB/s"] = static_cast<double>(all) / 1e3 / median;
  state.counters["of_broadcast"] = broadcast / median;
}

BENCHMARK(BM_Finish)
    ->ArgName("MB")
    ->Arg(1)
    ->Arg(30)
    ->Arg(300)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Join)->ArgName("MB")->Arg(1)->Arg(300)->UseManualTime()->Unit(
    benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp
