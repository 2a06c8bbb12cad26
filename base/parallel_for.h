// Loops that LibTorch's threads share, whatever compiles the caller.
#ifndef BASE_PARALLEL_FOR_H_
#define BASE_PARALLEL_FOR_H_

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace fsdp {

// Calls `fn` for ranges that together are [0, count), at the same time on the
// threads that LibTorch computes with (at::set_num_threads()). Only the calling
// thread works if `count` <= `grain` or it is one of several in such a loop.
// Throws what `fn` throws. `fn` reads and writes memory: it calls no operators,
// since the modes of the caller are not those of the threads, and takes no lock
// that the caller holds. at::parallel_for() would leave all to the caller in a
// source that is not compiled with the OpenMP that LibTorch has, GCC's.
void ParallelFor(int64_t count, int64_t grain,
                 absl::FunctionRef<void(int64_t begin, int64_t end)> fn);

}  // namespace fsdp

#endif  // BASE_PARALLEL_FOR_H_
