// What ranks put into the collectives of a test, and what must come out.
#ifndef COMM_TESTING_CONTRACT_VALUES_H_
#define COMM_TESTING_CONTRACT_VALUES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// What rank `rank` has at index `i`: exact in every dtype, as are sums of
// eight.
double Value(int rank, int64_t i);

// That of all ranks, reduced.
double Reduced(ReduceOp op, int world_size, int64_t i);

using ValueAt = absl::FunctionRef<double(int64_t i)>;

// A tensor with value(i) at index i.
at::Tensor MakeTensor(const at::TensorOptions& options, int64_t size,
                      ValueAt value);

// Internal, with the first element that is not expected(i).
absl::Status CheckTensor(const at::Tensor& tensor, ValueAt expected);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_CONTRACT_VALUES_H_
