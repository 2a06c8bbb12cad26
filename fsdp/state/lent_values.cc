#include "fsdp/state/lent_values.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/tensor_over.h"

namespace fsdp {

LentValues::LentValues(const at::Tensor& values, const std::string& until)
    : storage_(static_cast<int64_t>(values.nbytes()), values.device(),
               absl::StrCat("these are parameters or gradients of a sharded "
                            "model as they were whole, and ",
                            until, " is over: clone what has to outlive it")) {
  const NormalMode normal;
  storage_.Fill(values.mutable_data_ptr());
  tensor_ = TensorOver(storage_.storage(), 0, {values.numel()}, {1},
                       values.scalar_type());
}

}  // namespace fsdp
