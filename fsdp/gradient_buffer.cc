#include "fsdp/gradient_buffer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "base/check.h"
#include "flat_param/layout.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;

int64_t SegmentNumel(const FlatLayout& layout) {
  const int64_t alignment =
      std::max<int64_t>(1, FlatLayout::kAlignmentBytes / layout.element_size());
  const int64_t flags = layout.num_parameters();
  return layout.shard_numel() + (flags + alignment - 1) / alignment * alignment;
}

// What no parameter covers: alignment, padding, and room after the flags.
std::vector<Slice> Gaps(const FlatLayout& layout, int64_t segment_numel) {
  std::vector<Slice> gaps;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t base = rank * segment_numel;
    int64_t covered = base;
    for (int i = 0; i < layout.num_parameters(); ++i) {
      const Slice slice = layout.InShard(i, rank);
      if (slice.empty()) continue;
      if (base + slice.begin > covered) {
        gaps.push_back({covered, base + slice.begin});
      }
      covered = base + slice.end;
    }
    const int64_t flags = base + layout.shard_numel();
    if (flags > covered) gaps.push_back({covered, flags});
    const int64_t end_of_flags = flags + layout.num_parameters();
    if (base + segment_numel > end_of_flags) {
      gaps.push_back({end_of_flags, base + segment_numel});
    }
  }
  return gaps;
}

// `gradient` as 1-D in the storage order of its parameter; copies only where
// the strides differ.
at::Tensor StorageOrder(const at::Tensor& gradient, const ParameterSpec& spec) {
  at::Tensor dense = gradient;
  if (gradient.is_sparse()) dense = gradient.to_dense();
  if (dense.strides() != c10::IntArrayRef(spec.strides)) {
    at::Tensor copy =
        at::empty_strided(spec.sizes, spec.strides, dense.options());
    copy.copy_(dense);
    dense = std::move(copy);
  }
  return dense.as_strided({dense.numel()}, {1});
}

}  // namespace

GradientBuffer::GradientBuffer(flat_param::FlatParameter* parameter)
    : parameter_(parameter),
      segment_numel_(SegmentNumel(parameter->layout())),
      gaps_(Gaps(parameter->layout(), segment_numel_)) {}

int64_t GradientBuffer::bytes() const {
  const FlatLayout& layout = parameter_->layout();
  return segment_numel_ * layout.world_size() * layout.element_size();
}

at::Tensor GradientBuffer::Whole(const at::Tensor& memory) const {
  return memory.narrow(0, 0, bytes()).view(parameter_->dtype());
}

at::Tensor GradientBuffer::OwnSegment(const at::Tensor& memory) const {
  return Whole(memory).narrow(0, parameter_->rank() * segment_numel_,
                              segment_numel_);
}

void GradientBuffer::Fill(const at::Tensor& memory,
                          absl::Span<const at::Tensor> gradients) const {
  const FlatLayout& layout = parameter_->layout();
  FSDP_CHECK(static_cast<int>(gradients.size()) == layout.num_parameters());
  c10::NoGradGuard no_grad;
  const at::Tensor whole = Whole(memory);
  for (const Slice& gap : gaps_) {
    whole.narrow(0, gap.begin, gap.numel()).zero_();
  }
  for (int i = 0; i < layout.num_parameters(); ++i) {
    FillParameter(whole, i, gradients[i]);
  }
}

void GradientBuffer::FillParameter(const at::Tensor& whole, int i,
                                   const at::Tensor& gradient) const {
  const FlatLayout& layout = parameter_->layout();
  at::Tensor source;
  if (gradient.defined()) {
    source = StorageOrder(gradient, layout.parameter(i));
  }
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t base = rank * segment_numel_;
    const Slice slice = layout.InShard(i, rank);
    if (!slice.empty()) {
      at::Tensor target = whole.narrow(0, base + slice.begin, slice.numel());
      if (gradient.defined()) {
        const Slice part = layout.InParameter(i, rank);
        target.copy_(source.narrow(0, part.begin, part.numel()));
      } else {
        target.zero_();
      }
    }
    whole.narrow(0, base + layout.shard_numel() + i, 1)
        .fill_(gradient.defined() ? 1 : 0);
  }
}

at::Tensor GradientBuffer::GradientSlice(int i) const {
  const Slice slice = parameter_->layout().InShard(i, parameter_->rank());
  return shard_gradient_.narrow(0, slice.begin, slice.numel());
}

bool GradientBuffer::HoldsOurs(int i) const {
  const at::Tensor& gradient = parameter_->ShardSlice(i).grad();
  return gradient.defined() && shard_gradient_.defined() &&
         gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() ==
             shard_gradient_.storage().unsafeGetStorageImpl();
}

void GradientBuffer::AccumulateMean(const at::Tensor& memory) {
  c10::NoGradGuard no_grad;
  const FlatLayout& layout = parameter_->layout();
  const int count = layout.num_parameters();
  const double scale = 1.0 / layout.world_size();
  const at::Tensor segment = OwnSegment(memory);
  const at::Tensor reduced = segment.narrow(0, 0, layout.shard_numel());
  bool all_undefined = true;
  bool all_ours = true;
  for (int i = 0; i < count; ++i) {
    all_undefined &= !parameter_->ShardSlice(i).grad().defined();
    all_ours &= HoldsOurs(i);
  }
  // Memory that a gradient of the user's own keeping still refers to is left to
  // it, as a new gradient from LibTorch would.
  if (!shard_gradient_.defined() ||
      (all_undefined && shard_gradient_.storage().use_count() > 1)) {
    shard_gradient_ = at::empty_like(parameter_->shard());
  }
  if (all_undefined) {
    at::mul_out(shard_gradient_, reduced, at::Scalar(scale));
  } else if (all_ours) {
    shard_gradient_.add_(reduced, scale);
  } else {
    for (int i = 0; i < count; ++i) AccumulateSlice(i, reduced, scale);
  }
  const at::Tensor flags =
      segment.narrow(0, layout.shard_numel(), count).to(at::kCPU, at::kFloat);
  const float* produced = flags.const_data_ptr<float>();
  for (int i = 0; i < count; ++i) {
    at::Tensor slice = parameter_->ShardSlice(i);
    if (produced[i] == 0 || slice.grad().defined()) continue;
    // Detached, because torch::optim's zero_grad() detaches it in place, which
    // a view that autograd knows of refuses.
    slice.mutable_grad() = GradientSlice(i).detach();
  }
}

void GradientBuffer::AccumulateSlice(int i, const at::Tensor& reduced,
                                     double scale) {
  const Slice slice = parameter_->layout().InShard(i, parameter_->rank());
  const at::Tensor source = reduced.narrow(0, slice.begin, slice.numel());
  at::Tensor gradient = parameter_->ShardSlice(i).grad();
  if (gradient.defined()) {
    gradient.add_(source, scale);
  } else {
    at::Tensor target = GradientSlice(i);
    at::mul_out(target, source, at::Scalar(scale));
  }
}

}  // namespace fsdp
