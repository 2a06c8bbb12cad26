// Division by what the host knows and the compiler does not.
#ifndef DEVICE_OPS_CUDA_DIVIDER_CUH_
#define DEVICE_OPS_CUDA_DIVIDER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace fsdp::device_ops::cuda {

// A multiplication and a shift: a GPU has no instruction for divisions, and
// those of 64 bits take it about a hundred. Exact (Granlund and Montgomery,
// Division by Invariant Integers using Multiplication, 1994).
class Divider {
 public:
  // `divisor` > 0.
  explicit Divider(int64_t divisor) {
    const auto unsigned_divisor = static_cast<uint64_t>(divisor);
    while (uint64_t{1} << shift_ < unsigned_divisor) ++shift_;
    const uint64_t rest = (uint64_t{1} << shift_) - unsigned_divisor;
    multiplier_ = static_cast<uint64_t>(
        (static_cast<unsigned __int128>(rest) << 64) / unsigned_divisor + 1);
  }

  // number / divisor, 0 <= number.
  __device__ int64_t Quotient(int64_t number) const {
    const auto n = static_cast<uint64_t>(number);
    return static_cast<int64_t>((__umul64hi(n, multiplier_) + n) >> shift_);
  }

 private:
  uint64_t multiplier_;
  uint32_t shift_ = 0;
};

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_DIVIDER_CUH_
