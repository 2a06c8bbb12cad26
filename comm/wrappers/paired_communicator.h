// One group over two backends: one for tensors of the CPU, one for a device's.
#ifndef COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_
#define COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// Whether a collective on `tensor` is the host's. The same on all ranks.
using TakesHost = std::function<bool(const at::Tensor& tensor)>;

// Collectives on CPU tensors go to `host`, all others to `device`; both are of
// the same ranks. `takes_host` decides otherwise where it is given, from the
// tensor whose count all ranks share: an all-gather's `in`, a reduce-scatter's
// `out`. Calls are ordered within each backend only. Memory comes from
// `device`; a split splits both, and a failure of one aborts the other.
// InvalidArgument: there are not two backends of the same ranks.
absl::StatusOr<std::unique_ptr<Communicator>> CreatePairedCommunicator(
    std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> device,
    TakesHost takes_host = nullptr);

}  // namespace fsdp::comm

#endif  // COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_
