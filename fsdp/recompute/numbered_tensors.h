// Tensors to be moved out of memory, each with numbers of its own.
#ifndef FSDP_RECOMPUTE_NUMBERED_TENSORS_H_
#define FSDP_RECOMPUTE_NUMBERED_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/activation_offload_calls.h"
#include "offload/host_store.h"
#include "offload/param_store.h"

namespace fsdp::numbered_tensors {

using ::fsdp::offload::HostStore;
using ::fsdp::offload::ParamStore;
using ::fsdp::testing::MoveOne;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline constexpr int64_t kElements = 64;
inline constexpr int64_t kBytes = kElements * sizeof(float);

// Counts from `first`.
inline at::Tensor Numbers(int64_t first, int64_t elements = kElements) {
  return at::arange(first, first + elements, at::kFloat);
}

// A store with room for so many of kBytes.
inline std::unique_ptr<ParamStore> Host(int64_t tensors = 64) {
  return HostStore::Make(tensors * offload::StoredBytes(kBytes)).value();
}

inline WeakStorage MemoryOf(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

// Regions 0, 1, ... of one tensor each.
inline std::vector<std::unique_ptr<MovedArguments>> MoveRegions(
    ActivationOffload& offload, int count) {
  std::vector<std::unique_ptr<MovedArguments>> regions;
  regions.reserve(count);
  for (int i = 0; i < count; ++i) {
    regions.push_back(MoveOne(offload, Numbers(i)));
  }
  return regions;
}

}  // namespace fsdp::numbered_tensors

#endif  // FSDP_RECOMPUTE_NUMBERED_TENSORS_H_
