// The arguments of the kernel behind Pack().
#ifndef DEVICE_OPS_CUDA_PACK_ITEM_H_
#define DEVICE_OPS_CUDA_PACK_ITEM_H_

#include <cstdint>

#include "device_ops/cuda/element.h"

namespace fsdp::device_ops::cuda {

// Sets out[begin + i] = scale * source[i] for 0 <= i < numel, numel > 0;
// without a source, to `value`, which is not scaled.
struct PackItem {
  const void* source;
  Element element;  // of the source
  int64_t begin;
  int64_t numel;
  float value;
};

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_PACK_ITEM_H_
