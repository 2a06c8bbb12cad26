// How tests of ActivationOffload make tensors and ask for them.
#ifndef FSDP_TESTING_ACTIVATION_OFFLOAD_CALLS_H_
#define FSDP_TESTING_ACTIVATION_OFFLOAD_CALLS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "fsdp/recompute/activation_offload.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"

namespace fsdp::testing {

// With these options, any tensor is large enough to be moved.
inline ActivationOffloadOptions SmallOptions() {
  ActivationOffloadOptions options;
  options.min_bytes = 1;
  options.timeout = absl::Seconds(60);
  return options;
}

inline std::shared_ptr<ActivationOffload> Make(
    std::unique_ptr<offload::ParamStore> store,
    const ActivationOffloadOptions& options = SmallOptions()) {
  return ActivationOffload::Make(std::move(store), options).value();
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
inline WeakStorage MemoryOf(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

inline std::unique_ptr<MovedArguments> MoveOne(ActivationOffload& offload,
                                               at::Tensor tensor) {
  return offload.MoveOut({&tensor}, "a region");
}

// Moves `tensors` out; what stays is left in them.
inline std::unique_ptr<MovedArguments> MoveOut(
    ActivationOffload& offload, std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor*> pointers;
  pointers.reserve(tensors.size());
  for (at::Tensor& tensor : tensors) pointers.push_back(&tensor);
  return offload.MoveOut(pointers, "a region");
}

// Returns OK if `moved` is one tensor that has the values of `expected`.
inline absl::Status CheckMovesIn(MovedArguments& moved,
                                 const at::Tensor& expected) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<at::Tensor> tensors, moved.MoveIn());
  return tensors.size() == 1 && at::equal(tensors[0], expected)
             ? absl::OkStatus()
             : absl::InternalError("another tensor");
}

// Asks until the store has no more than `bytes`.
inline ::testing::AssertionResult StoreComesTo(ActivationOffload& offload,
                                               int64_t bytes) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (offload.stats().stored_bytes > bytes) {
    if (absl::Now() > deadline) {
      return ::testing::AssertionFailure()
             << "the store has " << offload.stats().stored_bytes << " bytes";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_ACTIVATION_OFFLOAD_CALLS_H_
