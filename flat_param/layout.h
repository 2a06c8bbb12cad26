// The layout of a unit's flat parameter: where each parameter lies, and which
// part each rank holds. It is pure arithmetic, without tensors or
// communication.
//
// The flat parameter has the parameters in storage order, one after the other,
// and is cut into one shard of equal size per rank:
//
//   | weight       |pad| bias |pad| other_weight            |pad      |
//   | shard of rank 0      | shard of rank 1      | shard of rank 2   |
//
// All offsets and counts are in elements, not bytes.
#ifndef FLAT_PARAM_LAYOUT_H_
#define FLAT_PARAM_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::flat_param {

// The name and form of one parameter of a unit.
struct ParameterSpec {
  std::string name;            // without wrappers: "blocks.0.qkv.weight"
  std::vector<int64_t> sizes;  // () for a scalar; may contain 0
  // Strides of a dense tensor without overlaps, so transposed and channels_last
  // tensors stay so. They are arbitrary for dimensions of size 1 and empty
  // tensors.
  std::vector<int64_t> strides;
};

// Half-open range of elements.
struct Slice {
  int64_t begin = 0;  // the first element
  int64_t end = 0;    // behind the last; not below `begin`

  // These say how many elements there are, and whether there are none.
  int64_t numel() const { return end - begin; }
  bool empty() const { return begin == end; }

  friend bool operator==(const Slice& a, const Slice& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

// Where the parameters of a unit lie. Immutable, hence thread-safe. Every query
// takes constant time. An index or rank out of range stops the program.
class FlatLayout {
 public:
  // By default each parameter and shard begins at a multiple of this, in a
  // buffer that does, so that vector instructions and collectives run at full
  // speed.
  static constexpr int64_t kAlignmentBytes = 16;

  // Lays out `parameters`, maybe none, in their order, each dense and free of
  // overlaps. Tied parameters must be listed once. `element_size` is in bytes.
  // An alignment of 1 leaves no padding between parameters. InvalidArgument
  // names a parameter: its name is listed twice, or the layout exceeds int64_t
  // bytes.
  static absl::StatusOr<FlatLayout> Create(
      std::vector<ParameterSpec> parameters, int64_t element_size,
      int world_size, int64_t alignment_bytes = kAlignmentBytes);

  // These return what Create() got, parameter i from 0 on.
  int num_parameters() const { return static_cast<int>(parameters_.size()); }
  const ParameterSpec& parameter(int i) const;
  int64_t element_size() const { return element_size_; }
  int world_size() const { return world_size_; }

  // Elements of all parameters together, without padding.
  int64_t numel() const { return numel_; }
  // Elements of one rank's shard, the same on all, padding included.
  int64_t shard_numel() const { return shard_numel_; }
  // Equals shard_numel() * world_size().
  int64_t padded_numel() const { return shard_numel_ * world_size_; }

  // Returns the range of parameter i in the flat parameter.
  Slice InFlat(int i) const;
  // Returns the range of the shard of `rank` in the flat parameter.
  Slice ShardRange(int rank) const;

  // Return the part of parameter i that `rank` holds, relative to the begin of
  // the shard or of the parameter's storage. If the rank holds nothing of it,
  // the slice is empty and lies inside the bounds.
  Slice InShard(int i, int rank) const;
  Slice InParameter(int i, int rank) const;

 private:
  FlatLayout(int64_t element_size, int world_size)
      : element_size_(element_size), world_size_(world_size) {}

  std::vector<ParameterSpec> parameters_;
  std::vector<Slice> slices_;  // in the flat parameter, one per parameter
  int64_t element_size_;
  int world_size_;
  int64_t numel_ = 0;
  int64_t shard_numel_ = 0;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_LAYOUT_H_
