// Shows people what threads did in one execution.
#ifndef TESTING_INTERLEAVINGS_TRACE_H_
#define TESTING_INTERLEAVINGS_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "testing/interleavings/arena.h"

namespace fsdp::interleavings {

struct TraceLine {
  int thread;
  int rank;
  const char* what;
  bool in_arena;  // `offset` is a place in it
  uint64_t offset = 0;
  uint64_t value = 0;
  bool is_old = false;  // a newer value was there
  uintptr_t site = 0;
};
using Trace = std::vector<TraceLine>;

// Writes a line for each, without a thread's repeated looks that see the same.
std::string ToString(const Trace& trace, const Arena& arena);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_TRACE_H_
