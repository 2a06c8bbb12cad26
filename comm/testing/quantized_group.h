// Makes groups that quantise, and numbers for them.
#ifndef COMM_TESTING_QUANTIZED_GROUP_H_
#define COMM_TESTING_QUANTIZED_GROUP_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {

// Returns the communicators by rank. `log` records the collectives of their
// bases.
inline absl::StatusOr<Group> QuantizedGroup(int world_size,
                                            const QuantizationOptions& options,
                                            CollectiveLog* log = nullptr) {
  FSDP_ASSIGN_OR_RETURN(auto group, CreateLocalGroup(world_size));
  for (auto& comm : group) {
    if (log != nullptr) comm = Record(std::move(comm), log);
    FSDP_ASSIGN_OR_RETURN(
        comm, CreateQuantizedCommunicator(std::move(comm), options));
  }
  return group;
}

inline absl::Status RunQuantized(
    int world_size, const QuantizationOptions& options,
    const std::function<absl::Status(Communicator&)>& run) {
  FSDP_ASSIGN_OR_RETURN(const auto group, QuantizedGroup(world_size, options));
  return AllOk(RunRanks(group, run));
}

inline at::Tensor RandomNumbers(int seed, at::ScalarType dtype, int64_t size) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const at::Tensor numbers = at::empty({size}, at::kDouble);
  double* const data = numbers.mutable_data_ptr<double>();
  for (int64_t i = 0; i < size; ++i) data[i] = normal(random);
  return numbers.to(dtype);
}

inline bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 ||
          std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_QUANTIZED_GROUP_H_
