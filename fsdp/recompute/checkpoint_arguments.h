// What a checkpointed region keeps from its forward to its backward.
#ifndef FSDP_RECOMPUTE_CHECKPOINT_ARGUMENTS_H_
#define FSDP_RECOMPUTE_CHECKPOINT_ARGUMENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/recompute/activation_offload.h"

namespace fsdp::checkpoint_internal {

// The version of a tensor that may be gone.
class TensorVersion {
 public:
  explicit TensorVersion(const at::Tensor& tensor);

  // Whether the tensor, or what shares memory with it, was modified in place.
  bool IsCurrent() const { return Now() == version_; }

 private:
  uint32_t Now() const {
    return counter_.enabled() ? counter_.current_version() : 0;
  }

  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
};

// The tensors in a region's arguments, without their graph.
class RegionArguments {
 public:
  // Takes `tensors` and leaves undefined ones. Those that may leave memory do
  // so where `offload` is given.
  RegionArguments(const std::vector<at::Tensor*>& tensors,
                  ActivationOffload* offload, std::string region_name);

  // FailedPrecondition, with its number, when one was modified since.
  absl::Status CheckUnmodified() const;

  // What was taken; the caller detaches it before use.
  absl::StatusOr<std::vector<at::Tensor>> Get();

 private:
  const std::string region_name_;
  std::vector<at::Tensor> tensors_;  // undefined while they are in `moved_`
  std::vector<TensorVersion> versions_;
  std::unique_ptr<MovedArguments> moved_;  // null: none
};

}  // namespace fsdp::checkpoint_internal

#endif  // FSDP_RECOMPUTE_CHECKPOINT_ARGUMENTS_H_
