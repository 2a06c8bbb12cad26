// The residual MLP as a sharded model.
#ifndef BENCHMARKS_SHARDED_MLP_H_
#define BENCHMARKS_SHARDED_MLP_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "benchmarks/residual_mlp.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"

namespace fsdp {

using ShardedMlp = FullyShardedDataParallel<ResidualMlpImpl>;

// Each block is a unit.
ShardedMlp ShardMlp(std::shared_ptr<comm::Communicator> ranks,
                    Options options = Options());

// A training step of `model`, by AdamW on `rows` random rows, the same ones
// each time.
std::function<void()> StepOf(ShardedMlp model, int64_t rows);

}  // namespace fsdp

#endif  // BENCHMARKS_SHARDED_MLP_H_
