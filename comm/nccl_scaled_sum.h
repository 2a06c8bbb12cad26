// How a scaled sum is spread over NCCL's reduction and what follows it.
#ifndef COMM_NCCL_SCALED_SUM_H_
#define COMM_NCCL_SCALED_SUM_H_

#include <c10/core/ScalarType.h>

namespace fsdp::comm {

struct NcclScaling {
  double before = 1;  // NCCL multiplies every rank's numbers with it
  double after = 1;   // what is left to do with the sum
};

// Before, which saves a pass over the sum, where `scale` is a number of `dtype`
// (what the halves round would make a mean inexact); after, where there is
// nothing to reduce. So NCCL has no plain sum, which alone NVLink switches and
// symmetric kernels do; its own mean is none, either.
NcclScaling SpreadScale(double scale, at::ScalarType dtype, int world_size);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_SCALED_SUM_H_
