// A communicator whose operations are recorded, whatever its backend.
#ifndef COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_
#define COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"
#include "comm/inspection/inspector.h"

namespace fsdp::comm {

// Records what is called on the result and on its sub-groups, fences and
// allocations included, and tells `inspector` what fails; allocates nothing for
// it per operation. Stops `inspector` at the end of the result, which
// sub-groups may outlive.
//
// Of collectives on a device only the start is known: nobody asks the device.
std::unique_ptr<Communicator> Inspect(std::unique_ptr<Communicator> base,
                                      std::shared_ptr<Inspector> inspector);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTED_COMMUNICATOR_H_
