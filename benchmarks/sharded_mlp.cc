#include "benchmarks/sharded_mlp.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "base/status_macros.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/forward.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"

namespace fsdp {

ResidualBlockImpl::ResidualBlockImpl()
    : fc(register_module("fc", torch::nn::Linear(kDim, 4 * kDim))),
      out(register_module("out", torch::nn::Linear(4 * kDim, kDim))) {}

at::Tensor ResidualBlockImpl::forward(const at::Tensor& x) {
  return x + out->forward(at::gelu(fc->forward(x)));
}

ResidualMlpImpl::ResidualMlpImpl()
    : blocks(register_module("blocks", torch::nn::ModuleList())),
      head(register_module("head", torch::nn::Linear(kDim, kDim))) {
  for (int i = 0; i < kBlocks; ++i) {
    blocks->push_back(std::make_shared<ResidualBlockImpl>());
  }
}

at::Tensor ResidualMlpImpl::forward(const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& block : *blocks) {
    y = Forward(*block->as<ResidualBlockImpl>(), y);
  }
  return head->forward(y);
}

at::Tensor ReconstructionLoss(const at::Tensor& output, const at::Tensor& x) {
  return (output - x).square().mean();
}

ShardedMlp ShardMlp(std::shared_ptr<comm::Communicator> ranks,
                    Options options) {
  options.wrap_policy = WrapModules<ResidualBlockImpl>();
  return ValueOrThrow(FullyShard(std::make_shared<ResidualMlpImpl>(),
                                 std::move(ranks), options));
}

Group MakeGroup(const std::string& backend, int ranks,
                comm::CollectiveLog* log) {
  Group group(ranks);
  auto local = ValueOrThrow(comm::CreateLocalGroup(ranks));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  OnAllRanks(ranks, [&](int rank) {
    std::unique_ptr<comm::Communicator> own = std::move(local[rank]);
    if (backend == "shared_memory") {
      own = ValueOrThrow(
          comm::CreateSharedMemoryCommunicator(store, rank, ranks));
    } else if (backend == "gloo") {
      own = ValueOrThrow(comm::CreateGlooCommunicator(store, rank, ranks));
    }
    group[rank] =
        log == nullptr ? std::move(own) : comm::Record(std::move(own), log);
  });
  return group;
}

std::function<void()> StepOf(ShardedMlp model, int64_t rows) {
  auto optimizer = std::make_shared<FusedAdamW>(model->Parameters());
  const at::Tensor x = at::randn({rows, ResidualMlpImpl::kDim});
  return [model = std::move(model), optimizer, x]() mutable {
    ThrowIfError(model->Backward(ReconstructionLoss(model->forward(x), x)));
    optimizer->step();
    optimizer->zero_grad();
  };
}

}  // namespace fsdp
