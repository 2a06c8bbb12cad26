#include "fsdp/runtime/gradient_layout.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::Slice;

int64_t AlignmentFor(int64_t element_size) {
  return std::max<int64_t>(1, FlatLayout::kAlignmentBytes / element_size);
}

int64_t RoundUp(int64_t numel, int64_t alignment) {
  return (numel + alignment - 1) / alignment * alignment;
}

}  // namespace

GradientLayout::GradientLayout(const FlatLayout& layout,
                               std::vector<bool> trained, int64_t element_size)
    : layout_(layout),
      trained_(std::move(trained)),
      element_size_(element_size),
      begins_(trained_.size(), 0) {
  FSDP_CHECK(static_cast<int>(trained_.size()) == layout.num_parameters());
  const int64_t shard_alignment = AlignmentFor(layout.element_size());
  const int64_t shard_numel = layout.shard_numel();
  int64_t used = 0;
  for (int i = 0; i < layout.num_parameters(); ++i) {
    if (!trained_[i]) continue;
    parameters_.push_back(i);
    begins_[i] = used;
    // A rank's shard begins at the first element of this parameter that it has.
    const Slice flat = layout.InFlat(i);
    while (static_cast<int64_t>(shard_begins_.size()) * shard_numel <
           flat.end) {
      const auto rank = static_cast<int64_t>(shard_begins_.size());
      shard_begins_.push_back(
          used + std::max<int64_t>(0, rank * shard_numel - flat.begin));
    }
    used += RoundUp(flat.numel(), shard_alignment);
  }
  shard_begins_.resize(world_size() + 1, used);
  for (int rank = 0; rank < world_size(); ++rank) {
    gradients_numel_ = std::max(gradients_numel_,
                                shard_begins_[rank + 1] - shard_begins_[rank]);
  }
  segment_numel_ =
      RoundUp(gradients_numel_ + num_flags(), AlignmentFor(element_size));
  FindGaps();
}

Slice GradientLayout::InSegment(int i, int rank) const {
  FSDP_CHECK(trained_[i]);
  const int64_t numel = layout_.InShard(i, rank).numel();
  if (numel == 0) return {};
  const int64_t before = std::max<int64_t>(
      0, rank * layout_.shard_numel() - layout_.InFlat(i).begin);
  const int64_t begin = begins_[i] + before - shard_begins_[rank];
  return {begin, begin + numel};
}

Slice GradientLayout::RanksOf(int i) const {
  const Slice flat = layout_.InFlat(i);
  if (flat.empty()) return {};
  const int64_t shard_numel = layout_.shard_numel();
  return {flat.begin / shard_numel, (flat.end - 1) / shard_numel + 1};
}

void GradientLayout::FindGaps() {
  std::vector<int64_t> covered(world_size(), 0);
  const auto add = [&](int64_t rank, int64_t end) {
    const int64_t base = rank * segment_numel_;
    if (end > covered[rank])
      gaps_.push_back({base + covered[rank], base + end});
  };
  for (int i : parameters_) {
    const Slice ranks = RanksOf(i);
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      const Slice slice = InSegment(i, static_cast<int>(rank));
      add(rank, slice.begin);
      covered[rank] = slice.end;
    }
  }
  for (int rank = 0; rank < world_size(); ++rank) add(rank, gradients_numel_);
}

int64_t GradientLayout::MostFlags(const FlatLayout& layout,
                                  int64_t element_size) {
  const int64_t alignment = AlignmentFor(element_size);
  const int64_t shard_alignment = AlignmentFor(layout.element_size());
  return RoundUp(layout.num_parameters(), alignment) +
         std::max<int64_t>(0, alignment - shard_alignment);
}

}  // namespace fsdp
