#include "benchmarks/step_calibration.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_error.h"
#include "benchmarks/rank_threads.h"
#include "comm/communicator.h"

namespace fsdp {
namespace {

constexpr int kBuffers = ResidualMlpImpl::kBlocks;
constexpr int64_t kBlockElements =
    8 * ResidualMlpImpl::kDim * ResidualMlpImpl::kDim;
constexpr absl::Duration kTimeout = absl::Minutes(1);

double Seconds(const std::function<void()>& fn) {
  const absl::Time start = absl::Now();
  fn();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

double Sum(const std::vector<double>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0);
}

}  // namespace

double PlainSeconds::compute() const { return Sum(forward) + Sum(backward); }

PlainModels::PlainModels(int threads, int64_t rows) : models_(threads) {
  for (Model& model : models_) {
    model.net = std::make_shared<ResidualMlpImpl>();
    model.optimizer = std::make_shared<FusedAdamW>(model.net->parameters());
    model.x = at::randn({rows, ResidualMlpImpl::kDim});
  }
}

PlainSeconds PlainModels::Measure() {
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

// Cuts the graph between the units, so that each has its own backward.
PlainSeconds PlainModels::Step(const Model& model) {
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
    loss = ReconstructionLoss(model.net->head->forward(inputs.back()), model.x);
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
  return bytes / (Sum(seconds) / threads);
}

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

}  // namespace fsdp
