// Loops that LibTorch's threads share, whatever compiles the caller.
#ifndef BASE_PARALLEL_FOR_H_
#define BASE_PARALLEL_FOR_H_

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace fsdp {

// Calls `fn` for ranges that together are [0, count), at the same time on the
// threads that LibTorch computes with (at::set_num_threads()). Only the calling
// thread works if `count` <= `grain` or it is one of several in such a loop.
// Throws what `fn` throws. at::parallel_for() does this only where the
// compiler's OpenMP is GCC's, which LibTorch has: it leaves all to the caller
// under clang.
void ParallelFor(int64_t count, int64_t grain,
                 absl::FunctionRef<void(int64_t begin, int64_t end)> fn);

}  // namespace fsdp

#endif  // BASE_PARALLEL_FOR_H_
