// Compares the simulator's predictions with measured steps of a residual MLP.
// What a prediction needs to know of this machine (compute of one unsharded
// rank, memory and the communicator's collectives) is measured in turns with
// the steps that it is for, so that both see the same noise. Counters, medians
// of the iterations: `predicted_ms`, `measured_ms`, and `predicted/measured`.
//   ./bazelw run -c opt //benchmarks:simulated_step_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/sharded_mlp.h"
#include "comm/communicator.h"
#include "fsdp/optim/fused_optimizer.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr int kBuffers = ResidualMlpImpl::kBlocks;
constexpr int64_t kBlockElements =
    8 * ResidualMlpImpl::kDim * ResidualMlpImpl::kDim;
constexpr absl::Duration kTimeout = absl::Minutes(1);

// Seconds on one rank, by unit: the root, with head and loss, then the blocks.
struct PlainSeconds {
  std::vector<double> forward;
  std::vector<double> backward;
  double optimizer = 0;

  double compute() const {
    return std::accumulate(forward.begin(), forward.end(), 0.0) +
           std::accumulate(backward.begin(), backward.end(), 0.0);
  }
};

// Runs steps of unsharded models that share nothing, one per thread, all at the
// same time.
class PlainModels {
 public:
  PlainModels(int threads, int64_t rows) : models_(threads) {
    for (Model& model : models_) {
      model.net = std::make_shared<ResidualMlpImpl>();
      model.optimizer = std::make_shared<FusedAdamW>(model.net->parameters());
      model.x = at::randn({rows, ResidualMlpImpl::kDim});
    }
  }

  // Returns the seconds of the second of two steps, the mean over the threads.
  PlainSeconds Measure() {
    std::vector<PlainSeconds> of_threads(models_.size());
    OnAllRanks(static_cast<int>(models_.size()), [&](int i) {
      Step(models_[i]);
      of_threads[i] = Step(models_[i]);
    });
    PlainSeconds mean = of_threads[0];
    const double count = static_cast<double>(of_threads.size());
    for (size_t i = 0; i < mean.forward.size(); ++i) {
      mean.forward[i] = mean.backward[i] = 0;
      for (const PlainSeconds& one : of_threads) {
        mean.forward[i] += one.forward[i] / count;
        mean.backward[i] += one.backward[i] / count;
      }
    }
    mean.optimizer = 0;
    for (const PlainSeconds& one : of_threads) {
      mean.optimizer += one.optimizer / count;
    }
    return mean;
  }

 private:
  struct Model {
    std::shared_ptr<ResidualMlpImpl> net;
    std::shared_ptr<FusedAdamW> optimizer;
    at::Tensor x;
  };

  // Cuts the graph between the units, so that each has its own backward.
  static PlainSeconds Step(const Model& model) {
    PlainSeconds seconds;
    seconds.forward.resize(kBuffers + 1);
    seconds.backward.resize(kBuffers + 1);
    std::vector<at::Tensor> inputs = {model.x};
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < kBuffers; ++i) {
      auto* block = model.net->blocks[i]->as<ResidualBlockImpl>();
      seconds.forward[i + 1] =
          Seconds([&] { outputs.push_back(block->forward(inputs.back())); });
      inputs.push_back(outputs.back().detach().requires_grad_());
    }
    at::Tensor loss;
    seconds.forward[0] = Seconds([&] {
      loss =
          ReconstructionLoss(model.net->head->forward(inputs.back()), model.x);
    });
    seconds.backward[0] = Seconds([&] { loss.backward(); });
    for (int i = kBuffers; i-- > 0;) {
      const at::Tensor gradient = inputs[i + 1].grad();
      seconds.backward[i + 1] = Seconds([&] { outputs[i].backward(gradient); });
      inputs.pop_back();
      outputs.pop_back();
    }
    seconds.optimizer = Seconds([&] {
      model.optimizer->step();
      model.optimizer->zero_grad();
    });
    return seconds;
  }

  std::vector<Model> models_;
};

// Returns the bytes that a thread reads and writes per second while `threads`
// copy buffers of the size of the model's units.
double CopyBandwidth(int threads) {
  std::vector<double> seconds(threads);
  OnAllRanks(threads, [&](int i) {
    std::vector<at::Tensor> from, to;
    for (int k = 0; k < kBuffers; ++k) {
      // Ones are written, while pages of zeros might not exist yet.
      from.push_back(at::ones({kBlockElements}));
      to.push_back(at::ones({kBlockElements}));
    }
    seconds[i] = Seconds([&] {
      for (int k = 0; k < kBuffers; ++k) to[k].copy_(from[k]);
    });
  });
  const double bytes = 2.0 * kBuffers * kBlockElements * sizeof(float);
  return bytes /
         (std::accumulate(seconds.begin(), seconds.end(), 0.0) / threads);
}

struct CollectiveSeconds {
  double latency = 0;  // with a few bytes
  double all_gather = 0;
  double reduce_scatter = 0;
};

// Returns the mean seconds of collectives in place on buffers of `bytes` in
// all.
CollectiveSeconds MeasureCollectives(const Group& group, int64_t bytes) {
  const int ranks = static_cast<int>(group.size());
  CollectiveSeconds result;
  OnAllRanks(ranks, [&](int rank) {
    comm::Communicator& comm = *group[rank];
    const auto wait = [](absl::StatusOr<std::unique_ptr<comm::Work>> work) {
      ThrowIfError(ValueOrThrow(std::move(work))->Wait(absl::Now() + kTimeout));
    };
    const auto measure = [&](int64_t shard, bool reduces) {
      std::vector<at::Tensor> buffers;
      buffers.reserve(kBuffers);
      for (int k = 0; k < kBuffers; ++k) {
        buffers.push_back(at::ones({shard * ranks}));
      }
      const auto run = [&] {
        for (const at::Tensor& whole : buffers) {
          const at::Tensor own = whole.narrow(0, rank * shard, shard);
          wait(reduces ? comm.ReduceScatter(own, whole, comm::ReduceOp::kSum,
                                            "calibration")
                       : comm.AllGather(whole, own, "calibration"));
        }
      };
      run();
      return Seconds(run) / kBuffers;
    };
    const int64_t shard =
        bytes / static_cast<int64_t>(sizeof(float)) / ranks / 4 * 4;
    CollectiveSeconds mine;
    mine.latency = measure(4, false);
    mine.all_gather = measure(shard, false);
    mine.reduce_scatter = measure(shard, true);
    if (rank == 0) result = mine;
  });
  return result;
}

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

// Returns the seconds of the second of two steps on the slowest rank.
double SlowestSeconds(const std::vector<std::function<void()>>& steps) {
  std::vector<double> seconds(steps.size());
  OnAllRanks(static_cast<int>(steps.size()), [&](int rank) {
    steps[rank]();
    seconds[rank] = Seconds(steps[rank]);
  });
  return *std::max_element(seconds.begin(), seconds.end());
}

void BM_Step(benchmark::State& state, const std::string& backend) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t rows = state.range(1);
  const Group group = MakeGroup(backend, ranks);
  std::vector<std::function<void()>> steps(ranks);
  OnAllRanks(ranks, [&](int rank) {
    steps[rank] = StepOf(ShardMlp(group[rank]), rows);
  });
  Prediction prediction(group, backend, rows);
  std::vector<double> predicted, measured, ratios;
  for (auto _ : state) {
    predicted.push_back(prediction.Measure());
    measured.push_back(SlowestSeconds(steps));
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

BENCHMARK_CAPTURE(BM_Step, local, "local")->Apply(MostlyCommunication);
BENCHMARK_CAPTURE(BM_Step, local, "local")->Apply(MostlyCompute);
BENCHMARK_CAPTURE(BM_Step, shared_memory, "shared_memory")
    ->Apply(MostlyCommunication);
BENCHMARK_CAPTURE(BM_Step, shared_memory, "shared_memory")
    ->Apply(MostlyCompute);
BENCHMARK_CAPTURE(BM_Step, gloo, "gloo")->Apply(MostlyCommunication);

}  // namespace
}  // namespace fsdp
