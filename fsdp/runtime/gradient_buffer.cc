#include "fsdp/runtime/gradient_buffer.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/check.h"
#include "base/device_streams.h"
#include "base/tensor_over.h"
#include "device_ops/pack.h"

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

// Adds the flags of every rank, and zeros for the padding behind them, as runs:
// a device is given each run as an argument.
void PackFlags(const GradientLayout& layout,
               absl::Span<const at::Tensor> gradients, bool adds,
               device_ops::Packing& packing) {
  std::vector<bool> raised;
  for (int i : layout.parameters()) raised.push_back(gradients[i].defined());
  const int64_t count = layout.num_flags();
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t segment_end = (rank + 1) * layout.segment_numel();
    const int64_t flags =
        rank * layout.segment_numel() + layout.gradients_numel();
    int64_t begin = 0;
    while (begin < count) {
      const bool is_defined = raised[begin];
      int64_t end = begin + 1;
      while (end < count && raised[end] == is_defined) ++end;
      if (is_defined) {
        packing.AddOnes(flags + begin, flags + end);
      } else if (!adds) {
        packing.AddZeros(flags + begin, flags + end);
      }
      begin = end;
    }
    if (!adds) packing.AddZeros(flags + count, segment_end);
  }
}

// Adds as LibTorch does on the host, which rounds a product and its sum once.
void AddOnHost(const at::Tensor& whole, const std::vector<at::Tensor>& sources,
               const device_ops::Packing& packing, double scale) {
  const c10::IntArrayRef pieces = packing.pieces();
  for (size_t i = 0; i < pieces.size(); i += device_ops::kNumbersOfPiece) {
    const at::Tensor to = RangeOf(whole, pieces[i + 2], pieces[i + 3]);
    if (pieces[i] == device_ops::Packing::kOnes) {
      to.fill_(1);
    } else {
      to.add_(RangeOf(sources[pieces[i]], pieces[i + 1], pieces[i + 3]), scale);
    }
  }
}

void MarkProduced(absl::Span<const at::Tensor> gradients,
                  ReduceBuffer& buffer) {
  buffer.produced.resize(gradients.size());
  for (int i : buffer.layout->parameters()) {
    if (gradients[i].defined()) buffer.produced[i] = true;
  }
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

GradientScaling MeanOver(int ranks, at::ScalarType reduce_dtype) {
  if (reduce_dtype != at::kHalf) return {1, 1.0 / ranks};
  double before = 1;
  while (ranks % static_cast<int>(before) == 0 && ranks / before > before) {
    before *= 2;
  }
  return {1 / before, before / ranks};
}

at::Tensor ReduceBuffer::Segment(at::ScalarType dtype, int rank) const {
  const int64_t numel = layout->segment_numel();
  return RangeOf(memory, dtype, is_segment ? 0 : rank * numel, numel);
}

FlatGradients::Layout FlatGradients::CurrentLayout(const Layout& with) const {
  std::vector<bool> trained(parameter_->num_parameters());
  bool any = false;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    trained[i] = parameter_->ShardSlice(i).requires_grad() ||
                 (with != nullptr && with->trained()[i]);
    any |= trained[i];
  }
  if (!any) return nullptr;
  if (with != nullptr && with->trained() == trained) return with;
  if (current_layout_ == nullptr || current_layout_->trained() != trained) {
    current_layout_ = std::make_shared<const GradientLayout>(
        parameter_->layout(), std::move(trained),
        static_cast<int64_t>(c10::elementSize(options_.reduce_dtype)));
  }
  return current_layout_;
}

int64_t FlatGradients::bytes() const {
  const Layout layout = CurrentLayout();
  return layout == nullptr ? 0 : layout->bytes();
}

int64_t FlatGradients::shard_bytes() const {
  const Layout layout = CurrentLayout();
  if (layout == nullptr) return 0;
  return layout->segment_numel() *
         static_cast<int64_t>(c10::elementSize(options_.gradient_dtype));
}

at::Tensor FlatGradients::Whole(const ReduceBuffer& buffer) const {
  return RangeOf(buffer.memory, options_.reduce_dtype, 0,
                 buffer.layout->numel());
}

at::Tensor FlatGradients::OwnSegment(const ReduceBuffer& buffer) const {
  return buffer.Segment(options_.reduce_dtype, parameter_->rank());
}

void FlatGradients::Fill(ReduceBuffer& buffer,
                         absl::Span<const at::Tensor> gradients) const {
  FSDP_CHECK(static_cast<int>(gradients.size()) ==
             parameter_->num_parameters());
  buffer.produced.clear();
  PackInto(buffer, gradients, /*adds=*/false);
}

void FlatGradients::Add(ReduceBuffer& buffer,
                        absl::Span<const at::Tensor> gradients) const {
  PackInto(buffer, gradients, /*adds=*/true);
}

void FlatGradients::Convert(const ReduceBuffer& from, ReduceBuffer& to) const {
  c10::NoGradGuard no_grad;
  if (to.is_segment && from.layout->trained() == to.layout->trained()) {
    OwnSegment(to).copy_(OwnSegment(from));
    to.produced = from.produced;
    return;
  }
  to.produced.clear();
  (to.is_segment ? OwnSegment(to) : Whole(to)).zero_();
  CopyParameters(from, to, /*adds=*/false);
}

void FlatGradients::AddSegment(const ReduceBuffer& from,
                               ReduceBuffer& to) const {
  c10::NoGradGuard no_grad;
  if (from.layout->trained() != to.layout->trained()) {
    return CopyParameters(from, to, /*adds=*/true);
  }
  OwnSegment(to).add_(OwnSegment(from));
  to.produced.resize(parameter_->num_parameters());
  for (size_t i = 0; i < from.produced.size(); ++i) {
    if (from.produced[i]) to.produced[i] = true;
  }
}

// Copies or adds the parameters that both buffers have, and their flags: one
// segment if adding or if one of the buffers is a segment, else all of them.
void FlatGradients::CopyParameters(const ReduceBuffer& from, ReduceBuffer& to,
                                   bool adds) const {
  const auto flag_of = [](const GradientLayout& layout, int i) {
    const auto& all = layout.parameters();
    return layout.gradients_numel() +
           (std::lower_bound(all.begin(), all.end(), i) - all.begin());
  };
  const auto copy = [adds](const at::Tensor& target, const at::Tensor& source) {
    adds ? target.add_(source) : target.copy_(source);
  };
  const bool of_one = adds || from.is_segment || to.is_segment;
  const int first = of_one ? parameter_->rank() : 0;
  const int last = of_one ? first : to.layout->world_size() - 1;
  to.produced.resize(parameter_->num_parameters());
  for (int i : to.layout->parameters()) {
    if (!from.layout->trained()[i]) continue;
    if (!from.produced.empty() && from.produced[i]) to.produced[i] = true;
    for (int rank = first; rank <= last; ++rank) {
      const at::Tensor source = from.Segment(options_.reduce_dtype, rank);
      const at::Tensor target = to.Segment(options_.reduce_dtype, rank);
      copy(RangeOf(target, flag_of(*to.layout, i), 1),
           RangeOf(source, flag_of(*from.layout, i), 1));
      const Slice old = from.layout->InSegment(i, rank);
      if (old.empty()) continue;
      copy(RangeOf(target, to.layout->InSegment(i, rank).begin, old.numel()),
           RangeOf(source, old.begin, old.numel()));
    }
  }
}

// Gives a device as few launches as possible.
void FlatGradients::PackInto(ReduceBuffer& buffer,
                             absl::Span<const at::Tensor> gradients,
                             bool adds) const {
  const c10::NoGradGuard no_grad;
  MarkProduced(gradients, buffer);
  const GradientLayout& layout = *buffer.layout;
  const at::Tensor whole = Whole(buffer);
  std::vector<at::Tensor> sources;
  device_ops::Packing packing;
  for (int i : layout.parameters()) {
    if (gradients[i].defined()) {
      sources.push_back(flat_param::StorageOrderOf(
          gradients[i], parameter_->layout().parameter(i)));
    }
    const Slice ranks = layout.RanksOf(i);
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      const Slice slice = layout.InSegment(i, static_cast<int>(rank));
      const int64_t begin = rank * layout.segment_numel() + slice.begin;
      if (gradients[i].defined()) {
        packing.AddPiece(
            static_cast<int64_t>(sources.size()) - 1,
            parameter_->layout().InParameter(i, static_cast<int>(rank)).begin,
            begin, slice.numel());
      } else if (!adds) {
        packing.AddZeros(begin, begin + slice.numel());
      }
    }
  }
  PackFlags(layout, gradients, adds, packing);
  const double scale = options_.scaling.before;
  if (adds && !HasStreams(whole.device())) {
    return AddOnHost(whole, sources, packing, scale);
  }
  if (!adds) {
    for (const Slice& gap : layout.gaps()) packing.AddZeros(gap.begin, gap.end);
  }
  device_ops::Pack(whole, sources, packing, scale, adds);
}

}  // namespace fsdp
