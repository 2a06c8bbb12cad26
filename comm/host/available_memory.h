// How much memory this process could get.
#ifndef COMM_HOST_AVAILABLE_MEMORY_H_
#define COMM_HOST_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace fsdp::comm {

// In bytes, about: of the machine, or of the tightest of the control groups
// around the process, of version 1 or 2, where that is less. Files that a group
// has cached count as free. As much as there can be where the system does not
// say.
int64_t AvailableMemory();

// The same, of a system whose files lie below `root`.
int64_t AvailableMemoryBelow(const std::string& root);

}  // namespace fsdp::comm

#endif  // COMM_HOST_AVAILABLE_MEMORY_H_
