// Compares the simulator's predictions with measured steps of a residual MLP.
// What a prediction needs to know of this machine (compute of one unsharded
// rank, memory and the communicator's collectives) is measured in turns with
// the steps that it is for, so that both see the same noise. Counters, medians
// of the iterations: `predicted_ms`, `measured_ms`, and `predicted/measured`.
//   ./bazelw run -c opt //benchmarks:simulated_step_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_error.h"
#include "benchmark/benchmark.h"
#include "benchmarks/rank_threads.h"
#include "benchmarks/sharded_mlp.h"
#include "benchmarks/step_calibration.h"
#include "comm/communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Group MakeGroup(const std::string& backend, int ranks) {
  Group group(ranks);
  auto local = ValueOrThrow(comm::CreateLocalGroup(ranks));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  OnAllRanks(ranks, [&](int rank) {
    if (backend == "local") {
      group[rank] = std::move(local[rank]);
    } else if (backend == "shared_memory") {
      group[rank] = ValueOrThrow(
          comm::CreateSharedMemoryCommunicator(store, rank, ranks));
    } else {
      group[rank] =
          ValueOrThrow(comm::CreateGlooCommunicator(store, rank, ranks));
    }
  });
  return group;
}

class ShardedModels {
 public:
  ShardedModels(const Group& group, int64_t rows) : ranks_(group.size()) {
    OnAllRanks(static_cast<int>(group.size()), [&](int rank) {
      Options options;
      options.wrap_policy = WrapModules<ResidualBlockImpl>();
      Rank& own = ranks_[rank];
      own.model = ValueOrThrow(FullyShard(std::make_shared<ResidualMlpImpl>(),
                                          group[rank], options));
      own.optimizer = std::make_unique<FusedAdamW>(own.model->Parameters());
      own.x = at::randn({rows, ResidualMlpImpl::kDim});
    });
  }

  // Returns the seconds of the second of two steps on the slowest rank.
  double Measure() {
    std::vector<double> seconds(ranks_.size());
    OnAllRanks(static_cast<int>(ranks_.size()), [&](int rank) {
      Step(ranks_[rank]);
      const absl::Time start = absl::Now();
      Step(ranks_[rank]);
      seconds[rank] = absl::ToDoubleSeconds(absl::Now() - start);
    });
    return *std::max_element(seconds.begin(), seconds.end());
  }

 private:
  struct Rank {
    FullyShardedDataParallel<ResidualMlpImpl> model{nullptr};
    std::unique_ptr<FusedAdamW> optimizer;
    at::Tensor x;
  };

  static void Step(Rank& rank) {
    ThrowIfError(rank.model->Backward(
        ReconstructionLoss(rank.model->forward(rank.x), rank.x)));
    rank.optimizer->step();
    rank.optimizer->zero_grad();
  }

  std::vector<Rank> ranks_;
};

void AddUnit(std::string name, int parent, const torch::nn::Module& module,
             simulator::ModelShape& model) {
  simulator::UnitShape& unit = model.units.emplace_back();
  unit.name = std::move(name);
  unit.parent = parent;
  for (const auto& item : module.named_parameters()) {
    unit.parameters.push_back(
        simulator::Parameter(item.key(), item.value().sizes().vec()));
  }
}

simulator::ModelShape Shape() {
  ResidualMlpImpl net;
  simulator::ModelShape model;
  AddUnit("root", /*parent=*/-1, *net.head, model);
  for (size_t i = 0; i < net.blocks->size(); ++i) {
    AddUnit(absl::StrCat("blocks.", i), 0, *net.blocks[i], model);
  }
  return model;
}

class Prediction {
 public:
  Prediction(const Group& group, const std::string& backend, int64_t rows)
      : group_(group),
        cores_(
            std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
        alone_(1, rows),
        together_(cores_, rows) {
    scenario_.model = Shape();
    scenario_.sharding.ranks = ranks();
    scenario_.costs.flops_per_second = kInfinity;
    scenario_.costs.shared_memory = backend == "shared_memory" && ranks() > 1;
    // Only Gloo has threads of its own, which run beside compute where there
    // are cores for them.
    scenario_.costs.overlap = backend == "gloo" && 2 * ranks() <= cores_;
  }

  // Measures the current costs, and returns the predicted seconds of a step.
  double Measure() {
    const PlainSeconds alone = alone_.Measure();
    for (size_t i = 0; i < alone.forward.size(); ++i) {
      scenario_.model.units[i].forward.seconds = alone.forward[i];
      scenario_.model.units[i].backward.seconds = alone.backward[i];
    }
    simulator::CostOptions& costs = scenario_.costs;
    // Cores that slow each other down count for less than one each.
    costs.cores =
        cores_ * std::clamp(alone.compute() / together_.Measure().compute(),
                            1.0 / cores_, 1.0);
    costs.memory_bandwidth = CopyBandwidth(1);
    costs.host_memory_bandwidth = cores_ * CopyBandwidth(cores_);
    // AdamW reads four numbers and writes three.
    costs.optimizer_bandwidth =
        7.0 * sizeof(float) *
        static_cast<double>(scenario_.model.num_elements()) / alone.optimizer;
    costs.levels = {MeasureNetwork()};
    return ValueOrThrow(simulator::Simulate(scenario_)).seconds;
  }

 private:
  static constexpr int64_t kUnitBytes =
      8 * ResidualMlpImpl::kDim * ResidualMlpImpl::kDim * sizeof(float);

  int ranks() const { return static_cast<int>(group_.size()); }

  // Returns the ring that takes as long as the collectives do.
  simulator::NetworkLevel MeasureNetwork() {
    simulator::NetworkLevel level;
    level.bandwidth = kInfinity;
    if (ranks() == 1) return level;
    const CollectiveSeconds seconds = MeasureCollectives(group_, kUnitBytes);
    const int64_t of_rank = kUnitBytes / ranks();
    const auto bytes = static_cast<double>(of_rank * (ranks() - 1));
    const auto bandwidth = [&](double of_unit) {
      return bytes / std::max(1e-9, of_unit - seconds.latency);
    };
    level.latency = seconds.latency / (ranks() - 1);
    if (scenario_.costs.shared_memory) {
      scenario_.costs.fence_seconds = seconds.latency;
      level.members = ranks();
      return level;
    }
    level.bandwidth = bandwidth(seconds.all_gather);
    level.reduce_bandwidth = bandwidth(seconds.reduce_scatter);
    return level;
  }

  const Group& group_;
  const int cores_;
  PlainModels alone_, together_;
  simulator::Scenario scenario_;
};

double Median(std::vector<double> numbers) {
  const auto middle =
      numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

void BM_Step(benchmark::State& state, const std::string& backend) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t rows = state.range(1);
  const Group group = MakeGroup(backend, ranks);
  ShardedModels sharded(group, rows);
  Prediction prediction(group, backend, rows);
  std::vector<double> predicted, measured, ratios;
  for (auto _ : state) {
    predicted.push_back(prediction.Measure());
    measured.push_back(sharded.Measure());
    ratios.push_back(predicted.back() / measured.back());
    state.SetIterationTime(measured.back());
  }
  state.counters["predicted_ms"] = 1e3 * Median(predicted);
  state.counters["measured_ms"] = 1e3 * Median(measured);
  state.counters["predicted/measured"] = Median(ratios);
}

void Ranks(benchmark::internal::Benchmark* benchmark, int64_t rows) {
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
  benchmark->ArgNames({"ranks", "rows"});
  for (int64_t ranks : {1, 2, 3, 4}) benchmark->Args({ranks, rows});
}
void MostlyCommunication(benchmark::internal::Benchmark* benchmark) {
  Ranks(benchmark, /*rows=*/16);
}
void MostlyCompute(benchmark::internal::Benchmark* benchmark) {
  Ranks(benchmark, /*rows=*/256);
}

BENCHMARK_CAPTURE(BM_Step, local, std::string("local"))
    ->Apply(MostlyCommunication);
BENCHMARK_CAPTURE(BM_Step, local, std::string("local"))->Apply(MostlyCompute);
BENCHMARK_CAPTURE(BM_Step, shared_memory, std::string("shared_memory"))
    ->Apply(MostlyCommunication);
BENCHMARK_CAPTURE(BM_Step, shared_memory, std::string("shared_memory"))
    ->Apply(MostlyCompute);
BENCHMARK_CAPTURE(BM_Step, gloo, std::string("gloo"))
    ->Apply(MostlyCommunication);

}  // namespace
}  // namespace fsdp
