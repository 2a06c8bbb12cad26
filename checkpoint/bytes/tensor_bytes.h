// Elements of tensors as bytes of a file, and back.
#ifndef CHECKPOINT_BYTES_TENSOR_BYTES_H_
#define CHECKPOINT_BYTES_TENSOR_BYTES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// InvalidArgument: the cast of `own`, which is `cast`, has made a finite value
// infinite. `advice`: the end of the text, after the dtype of `own`.
inline constexpr absl::string_view kAdviceForLoading =
    " for the model's values (--precision=fp32)";
absl::Status CheckFits(const at::Tensor& own, const at::Tensor& cast,
                       absl::string_view advice);

// Gives out, in any pieces, also such as cut elements, the bytes that `values`
// have in a file. Keeps one piece of them on the host at a time.
class TensorSource {
 public:
  // `values`: 1-D, with values as long as it is used, on any device. `dtype`:
  // in the file; casts round as copy_() does.
  TensorSource(at::Tensor values, c10::ScalarType dtype);

  int64_t bytes() const;
  // The bytes from `position` on. InvalidArgument: the cast would make a finite
  // value infinite. Internal: what LibTorch throws.
  absl::Status Read(int64_t position, absl::Span<char> out) const;

 private:
  at::Tensor values_;
  c10::ScalarType dtype_;
};

// Takes bytes of a file, in order and in any pieces, as elements of `values`.
class TensorSink {
 public:
  // `values`: 1-D, on any device and of any dtype that `dtype`, the file's, can
  // be cast to. Each write counts in its version.
  TensorSink(at::Tensor values, c10::ScalarType dtype);

  // The bytes from `position` on, which is where the last ones ended. Errors as
  // of TensorSource::Read().
  absl::Status Write(int64_t position, absl::Span<const char> bytes);

 private:
  absl::Status WriteElements(int64_t begin, absl::Span<const char> bytes);

  at::Tensor values_;
  c10::ScalarType dtype_;
  std::string cut_;  // of an element of which more is to come
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_BYTES_TENSOR_BYTES_H_
