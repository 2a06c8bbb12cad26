#include "testing/simulation/process.h"

#include <ATen/Parallel.h>
#include <malloc.h>
#include <sys/prctl.h>

namespace fsdp::simulation {

void PrepareProcess() {
  at::set_num_threads(1);
  // One thread runs at a time, and needs no memory of its own.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  // Of a stack a page or two are used, not two MiB to be cleared.
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

}  // namespace fsdp::simulation
