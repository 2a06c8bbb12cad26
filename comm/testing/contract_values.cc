#include "comm/testing/contract_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

double Value(int rank, int64_t i) {
  return static_cast<double>((rank * int64_t{7} + i * 3) % 9);
}

double Reduced(ReduceOp op, int world_size, int64_t i) {
  double result = Value(0, i);
  for (int rank = 1; rank < world_size; ++rank) {
    const double value = Value(rank, i);
    if (op == ReduceOp::kSum) result += value;
    if (op == ReduceOp::kMin) result = std::min(result, value);
    if (op == ReduceOp::kMax) result = std::max(result, value);
  }
  return result;
}

at::Tensor MakeTensor(const at::TensorOptions& options, int64_t size,
                      ValueAt value) {
  at::Tensor tensor = at::empty({size}, at::TensorOptions().dtype(at::kDouble));
  auto* data = static_cast<double*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < size; ++i) data[i] = value(i);
  return tensor.to(options);
}

absl::Status CheckTensor(const at::Tensor& tensor, ValueAt expected) {
  const at::Tensor copy = tensor.cpu().to(at::kDouble);
  const auto* data = static_cast<const double*>(copy.const_data_ptr());
  for (int64_t i = 0; i < copy.numel(); ++i) {
    if (data[i] == expected(i)) continue;
    return absl::InternalError(absl::StrCat(
        DtypeName(tensor.scalar_type()), " x ", tensor.numel(), ": element ", i,
        " is ", data[i], " and should be ", expected(i)));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::comm::testing
