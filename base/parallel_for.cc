#include "base/parallel_for.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

namespace fsdp {

void ParallelFor(int64_t count, int64_t grain,
                 absl::FunctionRef<void(int64_t begin, int64_t end)> fn) {
  if (count <= 0) return;
  if (count <= grain || at::get_num_threads() == 1 ||
      at::in_parallel_region()) {
    fn(0, count);
    return;
  }
  // LibTorch cuts a tensor of bytes that nobody reads or writes.
  char first = 0;
  at::Tensor bytes = at::from_blob(&first, {count}, at::kByte);
  at::TensorIterator cut = at::TensorIterator::nullary_op(bytes);
  cut.for_each(
      [&](char** data, const int64_t*, int64_t size, int64_t) {
        const auto begin =
            static_cast<int64_t>(reinterpret_cast<uintptr_t>(*data) -
                                 reinterpret_cast<uintptr_t>(&first));
        fn(begin, begin + size);
      },
      grain);
}

}  // namespace fsdp
