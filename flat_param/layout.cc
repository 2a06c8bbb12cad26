#include "flat_param/layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::flat_param {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Has room for sums and products of two numbers, each int64_t at most.
using Wide = absl::int128;

Wide RoundUp(Wide n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

std::string Describe(const ParameterSpec& spec) {
  return absl::StrCat("parameter '", spec.name, "' of sizes [",
                      absl::StrJoin(spec.sizes, ", "), "] and strides [",
                      absl::StrJoin(spec.strides, ", "), "]");
}

absl::Status TooLarge(const ParameterSpec& spec) {
  return absl::InvalidArgumentError(absl::StrCat(
      "flat layout: ", Describe(spec),
      " makes the flat parameter larger than 2^63 - 1 bytes; wrap it in "
      "several smaller units"));
}

// Returns whether the elements of `spec`, whose number fits int64_t and is not
// 0, fill a range of storage without gaps or overlaps.
bool IsDense(const ParameterSpec& spec) {
  absl::InlinedVector<std::pair<int64_t, int64_t>, 6> stride_and_size;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] != 1) {
      stride_and_size.emplace_back(spec.strides[d], spec.sizes[d]);
    }
  }
  std::sort(stride_and_size.begin(), stride_and_size.end());
  int64_t dense_stride = 1;
  for (const auto& [stride, size] : stride_and_size) {
    if (stride != dense_stride) return false;
    dense_stride *= size;
  }
  return true;
}

absl::StatusOr<int64_t> NumElements(const ParameterSpec& spec) {
  FSDP_CHECK(spec.sizes.size() == spec.strides.size());
  int64_t smallest = 1;
  for (const int64_t size : spec.sizes) smallest = std::min(smallest, size);
  FSDP_CHECK(smallest >= 0);
  // Decided first because the product of the other sizes may overflow.
  if (smallest == 0) return 0;
  Wide numel = 1;
  for (const int64_t size : spec.sizes) {
    numel *= size;
    if (numel > kMost) return TooLarge(spec);
  }
  FSDP_CHECK(IsDense(spec));
  return static_cast<int64_t>(numel);
}

absl::Status CheckNamesAreUnique(const std::vector<ParameterSpec>& parameters) {
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(parameters.size());
  for (const ParameterSpec& spec : parameters) {
    if (!names.insert(spec.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "flat layout: ", Describe(spec),
          " is listed twice; give each parameter its own name and list tied "
          "parameters once"));
    }
  }
  return absl::OkStatus();
}

// Returns the size of the least equal shards that hold `numel` elements, or
// nullopt if their bytes together overflow.
std::optional<int64_t> ShardNumel(Wide numel, int64_t alignment,
                                  int64_t element_size, int world_size) {
  const Wide shard = RoundUp((numel + world_size - 1) / world_size, alignment);
  if (shard * world_size > kMost / element_size) return std::nullopt;
  return static_cast<int64_t>(shard);
}

// Returns the part of `slice` inside `bounds`, or an empty slice at the nearer
// end of `bounds`.
Slice Clamp(const Slice& slice, const Slice& bounds) {
  return {std::clamp(slice.begin, bounds.begin, bounds.end),
          std::clamp(slice.end, bounds.begin, bounds.end)};
}

Slice Shift(const Slice& slice, int64_t by) {
  return {slice.begin - by, slice.end - by};
}

}  // namespace

absl::StatusOr<FlatLayout> FlatLayout::Create(
    std::vector<ParameterSpec> parameters, int64_t element_size, int world_size,
    int64_t alignment_bytes) {
  FSDP_CHECK(element_size >= 1 && world_size >= 1 && alignment_bytes >= 1);
  FSDP_RETURN_IF_ERROR(CheckNamesAreUnique(parameters));
  const int64_t alignment =
      alignment_bytes / std::gcd(alignment_bytes, element_size);
  FlatLayout layout(element_size, world_size);
  int64_t end = 0;
  for (const ParameterSpec& spec : parameters) {
    FSDP_ASSIGN_OR_RETURN(const int64_t size, NumElements(spec));
    const Wide begin = RoundUp(end, alignment);
    const std::optional<int64_t> shard_numel =
        ShardNumel(begin + size, alignment, element_size, world_size);
    if (!shard_numel.has_value()) return TooLarge(spec);
    end = static_cast<int64_t>(begin + size);
    layout.slices_.push_back({end - size, end});
    layout.numel_ += size;
    layout.shard_numel_ = *shard_numel;
  }
  layout.parameters_ = std::move(parameters);
  return layout;
}

const ParameterSpec& FlatLayout::parameter(int i) const {
  FSDP_CHECK(0 <= i && i < num_parameters());
  return parameters_[i];
}

Slice FlatLayout::InFlat(int i) const {
  FSDP_CHECK(0 <= i && i < num_parameters());
  return slices_[i];
}

Slice FlatLayout::ShardRange(int rank) const {
  FSDP_CHECK(0 <= rank && rank < world_size_);
  return {rank * shard_numel_, (rank + int64_t{1}) * shard_numel_};
}

Slice FlatLayout::InShard(int i, int rank) const {
  const Slice shard = ShardRange(rank);
  return Shift(Clamp(InFlat(i), shard), shard.begin);
}

Slice FlatLayout::InParameter(int i, int rank) const {
  const Slice parameter = InFlat(i);
  return Shift(Clamp(ShardRange(rank), parameter), parameter.begin);
}

}  // namespace fsdp::flat_param
