#include "comm/available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace fsdp::comm {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number in a file that holds one; kUnlimited for "max" or no such file.
int64_t NumberIn(const char* path) {
  int64_t number = 0;
  return std::ifstream(path) >> number ? number : kUnlimited;
}

int64_t OfMachine() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  int64_t kilobytes = 0;
  std::string unit;
  while (file >> key >> kilobytes) {
    if (key == "MemAvailable:") return kilobytes * 1024;
    std::getline(file, unit);
  }
  return kUnlimited;
}

int64_t OfContainer() {
  const int64_t limit = NumberIn("/sys/fs/cgroup/memory.max");
  const int64_t used = NumberIn("/sys/fs/cgroup/memory.current");
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  return std::max<int64_t>(0, limit - used);
}

}  // namespace

int64_t AvailableMemory() { return std::min(OfMachine(), OfContainer()); }

}  // namespace fsdp::comm
