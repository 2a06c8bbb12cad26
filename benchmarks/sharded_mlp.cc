#include "benchmarks/sharded_mlp.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "base/status_error.h"
#include "benchmarks/residual_mlp.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"

namespace fsdp {

ShardedMlp ShardMlp(std::shared_ptr<comm::Communicator> ranks,
                    Options options) {
  options.wrap_policy = WrapModules<ResidualBlockImpl>();
  return ValueOrThrow(FullyShard(std::make_shared<ResidualMlpImpl>(),
                                 std::move(ranks), options));
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
