// Inputs of the collectives of a test, and their expected outputs.
#ifndef COMM_TESTING_CONTRACT_VALUES_H_
#define COMM_TESTING_CONTRACT_VALUES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Returns the value of rank `rank` at index `i`. It and sums of eight are exact
// in every dtype.
double Value(int rank, int64_t i);

// Returns the values of all ranks, reduced.
double Reduced(ReduceOp op, int world_size, int64_t i);

using ValueAt = absl::FunctionRef<double(int64_t i)>;

// Makes a tensor with value(i) at index i.
at::Tensor MakeTensor(const at::TensorOptions& options, int64_t size,
                      ValueAt value);

// Returns Internal, with the first element that is not expected(i), or OK.
absl::Status CheckTensor(const at::Tensor& tensor, ValueAt expected);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_CONTRACT_VALUES_H_
