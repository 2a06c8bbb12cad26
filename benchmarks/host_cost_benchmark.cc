// Shows what sharding costs the host where layers compute next to nothing: a
// step of 100 units with one small parameter each, against the same model
// unsharded. Counter: `us_per_unit`, how much longer the step takes, per unit
// and step.
//   ./bazelw run -c opt //benchmarks:host_cost_benchmark
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <functional>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp {
namespace {

constexpr int kUnits = 100;
constexpr int64_t kDim = 16;

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl() : scale(register_parameter("scale", at::ones({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};

class LayersImpl : public torch::nn::Module {
 public:
  LayersImpl() : layers(register_module("layers", torch::nn::ModuleList())) {
    for (int i = 0; i < kUnits; ++i) {
      layers->push_back(std::make_shared<LayerImpl>());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& layer : *layers) y = Forward(*layer->as<LayerImpl>(), y);
    return y;
  }
  torch::nn::ModuleList layers;
};

using Step = std::function<void()>;

Step PlainStep() {
  const auto net = std::make_shared<LayersImpl>();
  const at::Tensor x = at::ones({kDim});
  return [net, x] {
    net->forward(x).sum().backward();
    for (const at::Tensor& p : net->parameters()) p.mutable_grad().reset();
  };
}

Step ShardedStep(std::shared_ptr<comm::Communicator> communicator) {
  Options options;
  options.wrap_policy = WrapModules<LayerImpl>();
  auto model = ValueOrThrow(FullyShard(std::make_shared<LayersImpl>(),
                                       std::move(communicator), options));
  const at::Tensor x = at::ones({kDim});
  return [model, x]() mutable {
    ThrowIfError(model->Backward(model->forward(x).sum()));
    model->zero_grad();
  };
}

// Runs each step of a rank in turn with one of the plain model.
void Measure(benchmark::State& state, const Step& sharded) {
  const Step plain = PlainStep();
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

void BM_OneRank(benchmark::State& state) {
  at::set_num_threads(1);
  auto group = ValueOrThrow(comm::CreateLocalGroup(1));
  Measure(state, ShardedStep(std::move(group[0])));
}
BENCHMARK(BM_OneRank)->UseManualTime()->Unit(benchmark::kMicrosecond);

// The time includes what ranks wait for each other.
void BM_SharedMemory(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [&](int rank) {
    at::set_num_threads(1);
    return std::shared_ptr<comm::Communicator>(
        ValueOrThrow(comm::CreateSharedMemoryCommunicator(store, rank, ranks)));
  };
  std::vector<std::thread> peers;
  for (int rank = 1; rank < ranks; ++rank) {
    peers.emplace_back([&, rank] {
      const Step step = ShardedStep(connect(rank));
      try {
        while (true) step();
      } catch (const StatusError&) {
        // Rank 0 has measured enough and left.
      }
    });
  }
  const auto own = connect(0);
  Measure(state, ShardedStep(own));
  own->Abort(absl::CancelledError("measured"));
  for (std::thread& peer : peers) peer.join();
}
BENCHMARK(BM_SharedMemory)
    ->Arg(2)
    ->ArgName("ranks")
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fsdp
