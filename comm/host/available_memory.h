// Estimates how much memory this process could get.
#ifndef COMM_HOST_AVAILABLE_MEMORY_H_
#define COMM_HOST_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <string>

namespace fsdp::comm {

// Returns about how many bytes are free on the machine, or in the tightest of
// the process's control groups (version 1 or 2) if that is less. Files that a
// group has cached count as free. Returns the largest int64_t if the system
// does not say. /proc and what is mounted are looked for under `root`.
int64_t AvailableMemory(const std::string& root = "");

}  // namespace fsdp::comm

#endif  // COMM_HOST_AVAILABLE_MEMORY_H_
