#include "testing/simulation/process.h"

#include <ATen/Parallel.h>
#include <malloc.h>
#include <sys/prctl.h>

namespace fsdp::simulation {

void PrepareProcess() {
  at::set_num_threads(1);
  // One thread runs at a time, so that threads need no memory of their own.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  // Stacks use a page or two, so that huge pages would only cost clearing.
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

}  // namespace fsdp::simulation
