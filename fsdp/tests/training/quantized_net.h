// A net whose gathers and sums send int8.
#ifndef FSDP_TESTS_TRAINING_QUANTIZED_NET_H_
#define FSDP_TESTS_TRAINING_QUANTIZED_NET_H_

#include <cstdint>

#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::quantized_net {

using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::NetImpl;

using Net = FullyShardedDataParallel<NetImpl>;

inline constexpr int64_t kDim = 11;
inline constexpr int kBlocks = 3;

inline Quantization Both() {
  Quantization quantization;
  quantization.gather = quantization.reduce = true;
  quantization.block = 32;
  return quantization;
}

inline Options Quantized(Options options = BlockUnits()) {
  options.quantize = Both();
  return options;
}

}  // namespace fsdp::quantized_net

#endif  // FSDP_TESTS_TRAINING_QUANTIZED_NET_H_
