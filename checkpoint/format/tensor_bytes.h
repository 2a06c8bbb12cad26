// Turns elements of tensors into bytes of a file, and back.
#ifndef CHECKPOINT_FORMAT_TENSOR_BYTES_H_
#define CHECKPOINT_FORMAT_TENSOR_BYTES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {

// The counterparts of LibTorch's dtypes and those of files. Nothing if there is
// none: quantized and packed dtypes of LibTorch, sub-byte ones of files.
std::optional<Dtype> FileDtype(c10::ScalarType dtype);
std::optional<c10::ScalarType> TorchDtype(Dtype dtype);

// InvalidArgument: casting `own` to `cast` has made a finite value infinite.
// `advice` ends the text, after the dtype of `own`.
inline constexpr absl::string_view kAdviceForLoading =
    " for the model's values (--precision=fp32)";
absl::Status CheckFits(const at::Tensor& own, const at::Tensor& cast,
                       absl::string_view advice);

// Reads the bytes that `values`, which is 1-D and on any device, have from
// `position` on in a file where they are of `dtype`. Elements may be cut; casts
// round as copy_() does. InvalidArgument: the cast would make a finite value
// infinite. Internal: LibTorch throws.
absl::Status ReadElements(const at::Tensor& values, c10::ScalarType dtype,
                          int64_t position, absl::Span<char> out);

// Takes bytes of a file, in order and in any pieces, as elements of `values`.
class TensorSink {
 public:
  // `values` is 1-D, on any device, of any dtype to which `dtype`, the file's,
  // can be cast. Each write counts in its version.
  TensorSink(at::Tensor values, c10::ScalarType dtype);

  c10::Device device() const { return values_.device(); }
  // Writes the bytes from `position` on, where the last call ended. Errors are
  // those of ReadElements(). A device may read `bytes` until its current
  // stream has done its present work. The host does not wait for page-locked
  // ones, unless it has to look for what would become infinite.
  absl::Status Write(int64_t position, absl::Span<const char> bytes);

 private:
  // Bytes that do not stay are read at once.
  absl::Status WriteElements(int64_t begin, absl::Span<const char> bytes,
                             bool stay);

  at::Tensor values_;
  c10::ScalarType dtype_;
  std::string cut_;  // the beginning of an element whose rest is to come
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FORMAT_TENSOR_BYTES_H_
