// Reads how much memory this process uses.
#ifndef COMM_INSPECTION_PROCESS_MEMORY_H_
#define COMM_INSPECTION_PROCESS_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::comm {

struct ProcessMemory {
  int64_t resident_bytes = 0;
  int64_t peak_bytes = 0;  // most that was resident
};

// Returns the memory of this process, or nullopt if the system does not say.
std::optional<ProcessMemory> ReadProcessMemory();

// Reads it from the text of /proc/self/status.
std::optional<ProcessMemory> ParseProcessMemory(absl::string_view status);

// Returns a text such as "1.5 GiB".
std::string BytesText(int64_t bytes);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_PROCESS_MEMORY_H_
