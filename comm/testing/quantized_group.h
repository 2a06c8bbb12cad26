// Makes groups that quantise, and numbers for them.
#ifndef COMM_TESTING_QUANTIZED_GROUP_H_
#define COMM_TESTING_QUANTIZED_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/recording_communicator.h"

namespace fsdp::comm::testing {

// Returns the communicators by rank. `log` records the collectives of their
// bases.
absl::StatusOr<Group> QuantizedGroup(int world_size,
                                     const QuantizationOptions& options,
                                     CollectiveLog* log = nullptr);

absl::Status RunQuantized(
    int world_size, const QuantizationOptions& options,
    const std::function<absl::Status(Communicator&)>& run);

at::Tensor RandomNumbers(int seed, at::ScalarType dtype, int64_t size);

bool SameBits(const at::Tensor& a, const at::Tensor& b);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_QUANTIZED_GROUP_H_
