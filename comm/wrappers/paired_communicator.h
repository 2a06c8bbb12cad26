// One group over two backends: one for CPU tensors, one for a device's tensors.
#ifndef COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_
#define COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"

namespace fsdp::comm {

// Returns a communicator that passes collectives on CPU tensors to `host` and
// all others to `device`; both have the same ranks. Calls are ordered within
// each backend only. Memory comes from `device`. Split() splits both, and a
// failure of one aborts the other. InvalidArgument: a backend is missing, or
// they have different ranks.
CreatedCommunicator CreatePairedCommunicator(
    std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> device);

}  // namespace fsdp::comm

#endif  // COMM_WRAPPERS_PAIRED_COMMUNICATOR_H_
