// Whole values that a caller gets to see for a time.
#ifndef FSDP_STATE_LENT_VALUES_H_
#define FSDP_STATE_LENT_VALUES_H_

#include <ATen/core/Tensor.h>

#include <string>

#include "flat_param/guarded_storage.h"

namespace fsdp {

// A tensor over memory that is somebody else's, until End(): from then on it,
// and all views of it, raise an error that says what has ended, and hold no
// memory. Not thread-safe.
class LentValues {
 public:
  // `values`: 1-D and contiguous; outlives End(). `until`: "the scope of
  // SummonFullParams()".
  LentValues(const at::Tensor& values, const std::string& until);

  // Of the same elements as `values`.
  const at::Tensor& tensor() const { return tensor_; }
  void End() { storage_.Empty(); }

 private:
  flat_param::GuardedStorage storage_;
  at::Tensor tensor_;
};

}  // namespace fsdp

#endif  // FSDP_STATE_LENT_VALUES_H_
