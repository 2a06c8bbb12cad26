// Names, element types and shapes of tensors in files, without LibTorch.
#ifndef CHECKPOINT_FORMAT_TENSOR_INFO_H_
#define CHECKPOINT_FORMAT_TENSOR_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// All types of safetensors 0.8, in the order of its reference writer: by rising
// alignment. Elements of sub-byte types are packed.
enum class Dtype : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kNumDtypes = static_cast<int>(Dtype::kU64) + 1;

// Returns safetensors' name of the type, such as "BF16".
absl::string_view NameOf(Dtype dtype);
// Returns nothing for a name that safetensors does not have.
std::optional<Dtype> DtypeNamed(absl::string_view name);

// Bits per element, 4 to 64.
int BitsOf(Dtype dtype);
// Bytes per element; 0 for sub-byte types.
int64_t ItemBytes(Dtype dtype);

// The elements lie row-major, without gaps.
struct TensorInfo {
  std::string name;  // "model.layers.0.self_attn.q_proj.weight"
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  // () for a scalar; may contain 0

  friend bool operator==(const TensorInfo& a, const TensorInfo& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  }
};

// Elements and bytes of the whole tensor. InvalidArgument names the tensor: it
// has a negative size, the result exceeds int64_t, or its sub-byte elements do
// not fill whole bytes.
absl::StatusOr<int64_t> NumelOf(const TensorInfo& tensor);
absl::StatusOr<int64_t> BytesOf(const TensorInfo& tensor);

// Returns "BF16[4096, 1024]".
std::string ToString(const TensorInfo& tensor);

// Returns InvalidArgument with the name and what it is in front of `why`.
absl::Status Refuse(const TensorInfo& tensor, absl::string_view why);

// Boxes of row-major tensors: they describe a range of elements to formats that
// know only rectangles.

// The elements whose index in each dimension i lies in [offsets[i], offsets[i]
// + sizes[i]). Both have an entry per dimension, and none for a scalar.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  // Returns the number of elements. It does not overflow if the box is inside a
  // tensor that NumelOf() accepts.
  int64_t Numel() const;

  friend bool operator==(const Box& a, const Box& b) {
    return a.offsets == b.offsets && a.sizes == b.sizes;
  }
};

// Returns the boxes that hold the elements [begin, end) of a row-major tensor:
// at most 2 d - 1 for d dimensions, 1 for a scalar, none for an empty range.
// They are in the order of the elements, so that their contents lie back to
// back as the range's do. `shape` is that of a TensorInfo that NumelOf()
// accepts, with 0 <= begin <= end <= numel.
std::vector<Box> RangeToBoxes(absl::Span<const int64_t> shape, int64_t begin,
                              int64_t end);

// InvalidArgument, saying why: the box is not inside a tensor of this shape.
absl::Status CheckInBounds(absl::Span<const int64_t> shape, const Box& box);

// Checks that every element of the tensor is in exactly one of `boxes`, each of
// which CheckInBounds() accepts. InvalidArgument names the first element that
// is in none or in several. Time grows with the sum of the boxes in each slab
// between two places where any begins or ends; more than 16 million are
// refused.
absl::Status CheckTiles(absl::Span<const int64_t> shape,
                        absl::Span<const Box> boxes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FORMAT_TENSOR_INFO_H_
