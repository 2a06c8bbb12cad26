// Compares a training step of a residual MLP, sharded over two ranks that are
// threads, with the floor of two independent plain models (each rank does all
// of the optimizer's work and does not communicate). `of_plan`: the most memory
// of gathered parameters and reduce buffers in use on a rank, over what the
// plan says; absent where no such memory is used.
//
// BM_HostCost shows what sharding costs the host where layers compute next to
// nothing: a step of 100 units with one small parameter each, against the same
// model unsharded. Counter: `us_per_unit`, how much longer the step takes, per
// unit and step.
//   ./bazelw run -c opt //benchmarks:train_step_benchmark
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/chain.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"

namespace fsdp {
namespace {

// A block of 2.1 million parameters.
class ResidualBlockImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 512;

  ResidualBlockImpl()
      : fc_(register_module("fc", torch::nn::Linear(kDim, 4 * kDim))),
        out_(register_module("out", torch::nn::Linear(4 * kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + out_->forward(at::gelu(fc_->forward(x)));
  }

 private:
  torch::nn::Linear fc_, out_;
};

using Net = std::shared_ptr<torch::nn::SequentialImpl>;

// Makes the model of all steps here.
Net MakeMlp() {
  constexpr int64_t kDim = ResidualBlockImpl::kDim;
  Net net = MakeChain<ResidualBlockImpl>(/*units=*/8);
  net->push_back(torch::nn::Linear(kDim, kDim));
  return net;
}

using ShardedNet = FullyShardedDataParallel<torch::nn::SequentialImpl>;
using Group = std::vector<std::shared_ptr<comm::Communicator>>;
using RankStep = std::function<void()>;

at::Tensor ReconstructionLoss(const at::Tensor& output, const at::Tensor& x) {
  return (output - x).square().mean();
}

// Connects ranks of this process by "local", "shared_memory" or "gloo". Their
// collectives are recorded unless `log` is null.
Group MakeGroup(const std::string& backend, int ranks,
                comm::CollectiveLog* log = nullptr) {
  constexpr absl::Duration kTimeout = absl::Minutes(5);
  Group group;
  for (auto& own : ValueOrThrow(
           backend == "shared_memory"
               ? comm::testing::CreateSharedMemoryGroup(ranks, kTimeout)
           : backend == "gloo" ? comm::testing::CreateGlooGroup(ranks, kTimeout)
                               : comm::CreateLocalGroup(ranks))) {
    group.push_back(log == nullptr ? std::move(own)
                                   : comm::Record(std::move(own), log));
  }
  return group;
}

// Backward of a plain model and of a sharded one.
void Backward(const Net& /*net*/, const at::Tensor& loss) { loss.backward(); }
void Backward(ShardedNet& model, const at::Tensor& loss) {
  ThrowIfError(model->Backward(loss));
}

// Returns a function that trains `model` for a step, by AdamW on `rows` random
// rows, the same ones each time.
template <typename Model>
RankStep StepOf(Model model, std::vector<at::Tensor> parameters, int64_t rows) {
  auto optimizer = std::make_shared<FusedAdamW>(std::move(parameters));
  const at::Tensor x = at::randn({rows, ResidualBlockImpl::kDim});
  return [model = std::move(model), optimizer, x]() mutable {
    Backward(model, ReconstructionLoss(model->forward(x), x));
    optimizer->step();
    optimizer->zero_grad();
  };
}
RankStep StepOf(const ShardedNet& model, int64_t rows) {
  return StepOf(model, model->Parameters(), rows);
}
RankStep PlainStep(int64_t rows) {
  const auto net = MakeMlp();
  return StepOf(net, net->parameters(), rows);
}

constexpr int kRanks = 2;

double SecondsPerStep(const std::vector<RankStep>& steps) {
  return Seconds(
      [&steps] { OnAllRanks(kRanks, [&](int rank) { steps[rank](); }); });
}

double OfPlan(const ShardedNet& model) {
  const MemoryStats stats = model->memory_stats();
  const MemoryPlan plan = model->PlanMemory();
  return static_cast<double>(stats.parameters.peak_in_use_bytes +
                             stats.gradients.peak_in_use_bytes) /
         static_cast<double>(plan.gathered + plan.in_flight);
}

// Alternates the floor with the sharded step, so that both see the same noise.
void BM_Step(benchmark::State& state, const std::string& backend) {
  const int64_t rows = state.range(0);
  comm::CollectiveLog log;
  const Group group = MakeGroup(backend, kRanks, &log);
  Options options;
  options.wrap_policy = WrapModules<ResidualBlockImpl>();
  std::vector<RankStep> sharded(kRanks);
  std::vector<RankStep> plain(kRanks);
  std::vector<ShardedNet> models(kRanks, nullptr);
  OnAllRanks(kRanks, [&](int rank) {
    models[rank] = ValueOrThrow(FullyShard(MakeMlp(), group[rank], options));
    sharded[rank] = StepOf(models[rank], rows);
  });
  for (RankStep& step : plain) step = PlainStep(rows);
  SecondsPerStep(sharded);
  SecondsPerStep(plain);
  log.Clear();
  double sharded_seconds = 0;
  double plain_seconds = 0;
  int64_t steps = 0;
  for (auto _ : state) {
    const double seconds = SecondsPerStep(sharded);
    state.SetIterationTime(seconds);
    sharded_seconds += seconds;
    plain_seconds += SecondsPerStep(plain);
    ++steps;
  }
  const auto per_rank_step = [&](comm::Collective collective) {
    return static_cast<double>(log.TotalsOf(collective).bytes) /
           static_cast<double>(steps * kRanks);
  };
  state.counters["ms"] = 1e3 * sharded_seconds / static_cast<double>(steps);
  state.counters["floor_ms"] = 1e3 * plain_seconds / static_cast<double>(steps);
  state.counters["ratio_to_floor"] = sharded_seconds / plain_seconds;
  state.counters["gathered_MB"] =
      per_rank_step(comm::Collective::kAllGather) / 1e6;
  state.counters["reduced_MB"] =
      per_rank_step(comm::Collective::kReduceScatter) / 1e6;
  state.counters["of_plan"] = OfPlan(models[0]);
}

void Rows(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(16)->Arg(256)->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Step, local, "local")->Apply(Rows);
BENCHMARK_CAPTURE(BM_Step, shared_memory, "shared_memory")->Apply(Rows);
BENCHMARK_CAPTURE(BM_Step, gloo, "gloo")->Apply(Rows);

constexpr int kUnits = 100;
constexpr int64_t kLayerDim = 16;

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl() : scale(register_parameter("scale", at::ones({kLayerDim}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};

template <typename Model>
RankStep LayersStep(Model model) {
  const at::Tensor x = at::ones({kLayerDim});
  return [model = std::move(model), x]() mutable {
    Backward(model, model->forward(x).sum());
    model->zero_grad();
  };
}

RankStep ShardedLayersStep(std::shared_ptr<comm::Communicator> communicator) {
  Options options;
  options.wrap_policy = WrapModules<LayerImpl>();
  return LayersStep(ValueOrThrow(FullyShard(MakeChain<LayerImpl>(kUnits),
                                            std::move(communicator), options)));
}

// Runs each step of a rank in turn with one of the plain model.
void MeasureHost(benchmark::State& state, const RankStep& sharded) {
  const RankStep plain = LayersStep(MakeChain<LayerImpl>(kUnits));
  for (int i = 0; i < 5; ++i) {
    plain();
    sharded();
  }
  double longer = 0;
  for (auto _ : state) {
    const double floor = Seconds(plain);
    const double whole = Seconds(sharded);
    state.SetIterationTime(whole);
    longer += whole - floor;
  }
  state.counters["us_per_unit"] =
      longer * 1e6 / kUnits / static_cast<double>(state.iterations());
}

// The time includes what ranks wait for each other.
void BM_HostCost(benchmark::State& state, const std::string& backend) {
  const auto ranks = static_cast<int>(state.range(0));
  at::set_num_threads(1);
  const Group group = MakeGroup(backend, ranks);
  std::vector<std::thread> peers;
  for (int rank = 1; rank < ranks; ++rank) {
    peers.emplace_back([&, rank] {
      at::set_num_threads(1);
      const RankStep step = ShardedLayersStep(group[rank]);
      try {
        while (true) step();
      } catch (const StatusError&) {
        // Rank 0 has measured enough and left.
      }
    });
  }
  MeasureHost(state, ShardedLayersStep(group[0]));
  group[0]->Abort(absl::CancelledError("measured"));
  for (std::thread& peer : peers) peer.join();
}

void InMicroseconds(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("ranks")->UseManualTime()->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(BM_HostCost, local, "local")->Arg(1)->Apply(InMicroseconds);
BENCHMARK_CAPTURE(BM_HostCost, shared_memory, "shared_memory")
    ->Arg(2)
    ->Apply(InMicroseconds);

}  // namespace
}  // namespace fsdp
