// The arguments that a checkpointed region keeps from forward to backward.
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

  // Returns false if the tensor, or one that shares its memory, was modified in
  // place.
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
  // Takes `tensors`, leaving undefined ones. With `offload` they leave memory,
  // except leaves that require grad, which somebody holds.
  RegionArguments(const std::vector<at::Tensor*>& tensors,
                  ActivationOffload* offload, std::string region_name);

  // FailedPrecondition gives the number of a tensor that was modified.
  absl::Status CheckUnmodified() const;

  // Returns what was taken. The caller detaches it before use.
  absl::StatusOr<std::vector<at::Tensor>> Get();

 private:
  const std::string region_name_;
  std::vector<at::Tensor> tensors_;  // undefined while they are in `moved_`
  std::vector<TensorVersion> versions_;
  std::unique_ptr<MovedArguments> moved_;  // null: none
};

}  // namespace fsdp::checkpoint_internal

#endif  // FSDP_RECOMPUTE_CHECKPOINT_ARGUMENTS_H_
