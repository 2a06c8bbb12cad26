// A net whose gathers and sums send int8.
#ifndef FSDP_TESTS_TRAINING_QUANTIZED_NET_H_
#define FSDP_TESTS_TRAINING_QUANTIZED_NET_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::quantized_net {

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

}  // namespace fsdp::testing::quantized_net

#endif  // FSDP_TESTS_TRAINING_QUANTIZED_NET_H_
