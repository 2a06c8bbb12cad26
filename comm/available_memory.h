// How much memory this process could get.
#ifndef COMM_AVAILABLE_MEMORY_H_
#define COMM_AVAILABLE_MEMORY_H_

#include <cstdint>

namespace fsdp::comm {

// In bytes, about: of the machine, or of the container where that is less. As
// much as there can be where the system does not say.
int64_t AvailableMemory();

}  // namespace fsdp::comm

#endif  // COMM_AVAILABLE_MEMORY_H_
