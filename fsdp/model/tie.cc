#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/model/forward.h"

namespace fsdp {
namespace {

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] on ",
                      tensor.device().str());
}

}  // namespace

absl::Status Tie(const at::Tensor& parameter, const at::Tensor& tied) {
  if (!parameter.defined() || !tied.defined()) {
    return absl::InvalidArgumentError("an undefined parameter cannot be tied");
  }
  if (parameter.sizes() != tied.sizes() ||
      parameter.scalar_type() != tied.scalar_type() ||
      parameter.device() != tied.device()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameters that differ cannot be tied: ", Describe(parameter), " and ",
        Describe(tied)));
  }
  for (const at::Tensor* each : {&parameter, &tied}) {
    if (flat_param::IsGuarded(each->storage())) {
      return absl::FailedPreconditionError(
          "a sharded parameter cannot be tied: tie before sharding");
    }
    if (each->grad().defined()) {
      return absl::FailedPreconditionError(
          "a parameter that has a gradient cannot be tied: tie before "
          "training");
    }
  }
  return TorchToStatus("tying parameters",
                       [&] { tied.set_data(parameter.detach()); });
}

}  // namespace fsdp
