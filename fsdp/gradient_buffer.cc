#include "fsdp/gradient_buffer.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "device_ops/pack.h"
#include "flat_param/layout.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::Slice;

int64_t SegmentNumel(const FlatLayout& layout, int64_t element_size) {
  const int64_t alignment =
      std::max<int64_t>(1, FlatLayout::kAlignmentBytes / element_size);
  // The shard is aligned for the parameters' dtypes, which may be wider.
  const int64_t used = layout.shard_numel() + layout.num_parameters();
  return (used + alignment - 1) / alignment * alignment;
}

// What no parameter covers before the flags: alignment and padding.
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
  }
  return gaps;
}

// The ways around operators below are for tensors on the host, where calling
// one costs more than what it does to a few bytes.
constexpr size_t kFewBytes = 16 << 10;

void Copy(const at::Tensor& target, const at::Tensor& source) {
  if (target.numel() == 0) return;
  if (target.is_cpu() && source.is_cpu() && target.nbytes() <= kFewBytes &&
      target.scalar_type() == source.scalar_type()) {
    std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(),
                target.nbytes());
  } else {
    target.copy_(source);
  }
}

void SetToZero(const at::Tensor& whole, const Slice& range) {
  const auto size = static_cast<int64_t>(whole.element_size());
  char* const data = static_cast<char*>(whole.mutable_data_ptr());
  std::memset(data + range.begin * size, 0, range.numel() * size);
}

Produced ReadFlags(const at::Tensor& source) {
  const at::Tensor on_host = source.cpu();
  Produced flags(on_host.numel());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, on_host.scalar_type(), "ReadFlags", [&] {
        const scalar_t* const data = on_host.const_data_ptr<scalar_t>();
        for (size_t i = 0; i < flags.size(); ++i) flags[i] = data[i] != 0;
      });
  return flags;
}

// The flags of every rank and what follows them, in runs: a device is given
// each run as an argument.
void PackFlags(const FlatLayout& layout, int64_t segment_numel,
               absl::Span<const at::Tensor> gradients, bool adds,
               device_ops::Packing& packing) {
  const auto count = static_cast<int64_t>(gradients.size());
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t segment_end = (rank + 1) * segment_numel;
    const int64_t flags = segment_end - segment_numel + layout.shard_numel();
    int64_t begin = 0;
    while (begin < count) {
      const bool is_defined = gradients[begin].defined();
      int64_t end = begin + 1;
      while (end < count && gradients[end].defined() == is_defined) ++end;
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

// Of contiguous tensors of one size. Multiplies in the wider of the two dtypes.
void CopyScaled(at::Tensor target, const at::Tensor& source, double scale) {
  if (HasStreams(target.device())) {
    device_ops::CopyScaled(target, source, scale);
  } else if (scale == 1) {
    Copy(target, source);
  } else if (target.scalar_type() == source.scalar_type()) {
    at::mul_out(target, source, at::Scalar(scale));
  } else if (target.element_size() > source.element_size()) {
    target.copy_(source).mul_(scale);
  } else {
    target.copy_(source.mul(scale));
  }
}

}  // namespace

void MarkProduced(absl::Span<const at::Tensor> gradients, Produced& produced) {
  produced.resize(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) produced[i] = true;
  }
}

int64_t ShardGradientBytes(const FlatLayout& layout,
                           const GradientBufferOptions& options) {
  const auto reduced =
      static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto stored =
      static_cast<int64_t>(c10::elementSize(options.gradient_dtype));
  return SegmentNumel(layout, reduced) * stored;
}

GradientScaling MeanOver(int ranks, at::ScalarType reduce_dtype) {
  if (reduce_dtype != at::kHalf) return {1, 1.0 / ranks};
  double before = 1;
  while (ranks % static_cast<int>(before) == 0 && ranks / before > before) {
    before *= 2;
  }
  return {1 / before, before / ranks};
}

GradientBuffer::GradientBuffer(flat_param::FlatParameter* parameter,
                               GradientBufferOptions options)
    : parameter_(parameter),
      options_(options),
      segment_numel_(SegmentNumel(
          parameter->layout(),
          static_cast<int64_t>(c10::elementSize(options.reduce_dtype)))),
      gaps_(Gaps(parameter->layout(), segment_numel_)) {}

int64_t GradientBuffer::bytes() const {
  const FlatLayout& layout = parameter_->layout();
  return segment_numel_ * layout.world_size() *
         static_cast<int64_t>(c10::elementSize(options_.reduce_dtype));
}

at::Tensor GradientBuffer::Whole(const at::Tensor& memory) const {
  return RangeOf(memory, options_.reduce_dtype, 0,
                 segment_numel_ * parameter_->layout().world_size());
}

at::Tensor GradientBuffer::OwnSegment(const at::Tensor& memory) const {
  return RangeOf(memory, options_.reduce_dtype,
                 parameter_->rank() * segment_numel_, segment_numel_);
}

void GradientBuffer::Fill(const at::Tensor& memory,
                          absl::Span<const at::Tensor> gradients) const {
  const FlatLayout& layout = parameter_->layout();
  FSDP_CHECK(static_cast<int>(gradients.size()) == layout.num_parameters());
  c10::NoGradGuard no_grad;
  const at::Tensor whole = Whole(memory);
  if (HasStreams(whole.device()))
    return PackInto(whole, gradients, /*adds=*/false);
  for (const Slice& gap : gaps_) SetToZero(whole, gap);
  for (int i = 0; i < layout.num_parameters(); ++i) {
    FillParameter(whole, i, gradients[i]);
  }
  WriteFlags(whole, gradients);
}

void GradientBuffer::WriteFlags(const at::Tensor& whole,
                                absl::Span<const at::Tensor> gradients) const {
  const FlatLayout& layout = parameter_->layout();
  const int64_t begin = layout.shard_numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, whole.scalar_type(), "WriteFlags", [&] {
        scalar_t* const data = whole.mutable_data_ptr<scalar_t>();
        for (int rank = 0; rank < layout.world_size(); ++rank) {
          scalar_t* const flags = data + rank * segment_numel_ + begin;
          std::fill(flags, flags + segment_numel_ - begin, scalar_t(0));
          for (size_t i = 0; i < gradients.size(); ++i) {
            if (gradients[i].defined()) flags[i] = scalar_t(1);
          }
        }
      });
}

void GradientBuffer::RaiseFlags(const at::Tensor& whole,
                                absl::Span<const at::Tensor> gradients) const {
  const FlatLayout& layout = parameter_->layout();
  const auto is_defined = [](const at::Tensor& gradient) {
    return gradient.defined();
  };
  auto begin = std::find_if(gradients.begin(), gradients.end(), is_defined);
  while (begin != gradients.end()) {
    const auto end = std::find_if_not(begin, gradients.end(), is_defined);
    whole
        .as_strided({layout.world_size(), end - begin}, {segment_numel_, 1},
                    whole.storage_offset() + layout.shard_numel() +
                        (begin - gradients.begin()))
        .fill_(1);
    begin = std::find_if(end, gradients.end(), is_defined);
  }
}

void GradientBuffer::Add(const at::Tensor& memory,
                         absl::Span<const at::Tensor> gradients) const {
  c10::NoGradGuard no_grad;
  const at::Tensor whole = Whole(memory);
  if (HasStreams(whole.device()))
    return PackInto(whole, gradients, /*adds=*/true);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    AddParameter(whole, static_cast<int>(i), gradients[i]);
  }
  RaiseFlags(whole, gradients);
}

// A device does it in as few launches as there can be.
void GradientBuffer::PackInto(const at::Tensor& whole,
                              absl::Span<const at::Tensor> gradients,
                              bool adds) const {
  const FlatLayout& layout = parameter_->layout();
  std::vector<at::Tensor> sources;
  device_ops::Packing packing;
  for (int i = 0; i < layout.num_parameters(); ++i) {
    if (gradients[i].defined()) {
      sources.push_back(
          flat_param::StorageOrderOf(gradients[i], layout.parameter(i)));
    }
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const int64_t base = rank * segment_numel_;
      const Slice slice = layout.InShard(i, rank);
      const int64_t begin = base + slice.begin;
      if (gradients[i].defined() && !slice.empty()) {
        packing.AddPiece(static_cast<int64_t>(sources.size()) - 1,
                         layout.InParameter(i, rank).begin, begin,
                         slice.numel());
      } else if (!adds && !slice.empty()) {
        packing.AddZeros(begin, begin + slice.numel());
      }
    }
  }
  PackFlags(layout, segment_numel_, gradients, adds, packing);
  if (adds) {
    return device_ops::PackAdd(whole, sources, packing,
                               options_.scaling.before);
  }
  for (const Slice& gap : gaps_) packing.AddZeros(gap.begin, gap.end);
  device_ops::Pack(whole, sources, packing, options_.scaling.before);
}

void GradientBuffer::AddParameter(const at::Tensor& whole, int i,
                                  const at::Tensor& gradient) const {
  const FlatLayout& layout = parameter_->layout();
  const at::Tensor source =
      flat_param::StorageOrderOf(gradient, layout.parameter(i));
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t base = rank * segment_numel_;
    const Slice slice = layout.InShard(i, rank);
    if (!slice.empty()) {
      const Slice part = layout.InParameter(i, rank);
      RangeOf(whole, base + slice.begin, slice.numel())
          .add_(RangeOf(source, part.begin, part.numel()),
                options_.scaling.before);
    }
  }
}

void GradientBuffer::FillParameter(const at::Tensor& whole, int i,
                                   const at::Tensor& gradient) const {
  const FlatLayout& layout = parameter_->layout();
  at::Tensor source;
  if (gradient.defined()) {
    source = flat_param::StorageOrderOf(gradient, layout.parameter(i));
  }
  // Nobody has saved the buffer for a backward, so no version has to count.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t base = rank * segment_numel_;
    const Slice slice = layout.InShard(i, rank);
    if (slice.empty()) continue;
    const Slice target = {base + slice.begin, base + slice.end};
    if (gradient.defined()) {
      const Slice part = layout.InParameter(i, rank);
      CopyScaled(RangeOf(whole, target.begin, target.numel()),
                 RangeOf(source, part.begin, part.numel()),
                 options_.scaling.before);
    } else {
      SetToZero(whole, target);
    }
  }
}

at::Tensor GradientBuffer::GradientSlice(int i) const {
  const Slice slice = parameter_->layout().InShard(i, parameter_->rank());
  return RangeOf(shard_gradient_, slice.begin, slice.numel());
}

bool GradientBuffer::HoldsOurs(int i) const {
  const at::Tensor& gradient = parameter_->ShardSlice(i).grad();
  return gradient.defined() && shard_gradient_.defined() &&
         gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() ==
             shard_gradient_.storage().unsafeGetStorageImpl();
}

absl::Status GradientBuffer::AccumulateMean(const at::Tensor& memory,
                                            const Produced& produced) {
  c10::NoGradGuard no_grad;
  const FlatLayout& layout = parameter_->layout();
  const int count = layout.num_parameters();
  const double scale = options_.scaling.after;
  const at::Tensor segment = OwnSegment(memory);
  const at::Tensor reduced = RangeOf(segment, 0, layout.shard_numel());
  const Present present = PresentGradients();
  RenewMemory(present);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard_gradient_, UseFor(present)));
  at::Tensor gradient = RangeOf(shard_gradient_, 0, layout.shard_numel());
  switch (present) {
    case Present::kNone:
      CopyScaled(gradient, reduced, scale);
      break;
    case Present::kOurs:
      gradient.add_(reduced, scale);
      break;
    case Present::kMixed:
      for (int i = 0; i < count; ++i) AccumulateSlice(i, reduced, scale);
      break;
  }
  Attach(RangeOf(segment, layout.shard_numel(), count), produced);
  return absl::OkStatus();
}

bool GradientBuffer::TakeOver(at::Tensor& memory, const Produced& produced) {
  const FlatLayout& layout = parameter_->layout();
  const bool is_plain_copy = layout.world_size() == 1 &&
                             options_.memory == nullptr &&
                             options_.scaling.after == 1 &&
                             options_.reduce_dtype == options_.gradient_dtype &&
                             static_cast<int64_t>(memory.nbytes()) == bytes();
  if (!is_plain_copy || PresentGradients() != Present::kNone) return false;
  c10::NoGradGuard no_grad;
  at::Tensor former;
  if (shard_gradient_.defined() && shard_gradient_.storage().use_count() == 1) {
    former = RangeOf(shard_gradient_, at::kByte, 0, bytes());
  }
  shard_gradient_ = OwnSegment(memory);
  is_taken_over_ = true;
  memory = std::move(former);
  Attach(
      RangeOf(shard_gradient_, layout.shard_numel(), layout.num_parameters()),
      produced);
  return true;
}

// Where a slice has a gradient of the user's own, ours next to it stays.
Use GradientBuffer::UseFor(Present present) {
  return present == Present::kNone ? Use::kOverwrite : Use::kUpdate;
}

GradientBuffer::Present GradientBuffer::PresentGradients() const {
  bool any = false;
  bool all_ours = true;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    any |= parameter_->ShardSlice(i).grad().defined();
    all_ours &= HoldsOurs(i);
  }
  if (!any) return Present::kNone;
  return all_ours ? Present::kOurs : Present::kMixed;
}

// Memory that a gradient of the user's own keeping still refers to is left to
// it, as a new gradient from LibTorch would.
void GradientBuffer::RenewMemory(Present present) {
  if (options_.memory != nullptr) {
    shard_gradient_ = options_.memory->AsTensor(options_.gradient_dtype);
    return;
  }
  if (shard_gradient_.defined() &&
      (present != Present::kNone ||
       shard_gradient_.storage().use_count() == 1)) {
    return;
  }
  is_taken_over_ = false;
  shard_gradient_ =
      at::empty({segment_numel_},
                parameter_->shard().options().dtype(options_.gradient_dtype));
}

absl::StatusOr<absl::optional<GradientBuffer::DirectTarget>>
GradientBuffer::StartDirect() {
  absl::optional<DirectTarget> target;
  Present present = PresentGradients();
  if (present == Present::kMixed) return target;
  // A backward may be given up while a stream still adds to its gradients.
  const bool is_fresh = present == Present::kNone && direct_.empty() &&
                        options_.memory == nullptr;
  if (HasStreams(parameter_->shard().device()) && !is_fresh) return target;
  // The slices that those under way will attach.
  if (!direct_.empty()) present = Present::kOurs;
  RenewMemory(present);
  FSDP_ASSIGN_OR_RETURN(Resident resident,
                        Resident::Of(shard_gradient_, UseFor(present)));
  direct_.push_back(std::move(resident));
  target = DirectTarget{shard_gradient_,
                        {options_.scaling.after, present == Present::kOurs}};
  return target;
}

void GradientBuffer::FinishDirect(const Produced& produced) {
  FSDP_CHECK(!direct_.empty());
  c10::NoGradGuard no_grad;
  Attach(RangeOf(shard_gradient_, parameter_->layout().shard_numel(),
                 parameter_->num_parameters()),
         produced);
  direct_.pop_front();
}

void GradientBuffer::ForgetDirect() {
  if (direct_.empty()) return;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    if (HoldsOurs(i)) parameter_->ShardSlice(i).mutable_grad().reset();
  }
  for (Resident& resident : direct_) abandoned_.push_back(std::move(resident));
  direct_.clear();
  shard_gradient_.reset();
  is_taken_over_ = false;
}

void GradientBuffer::Prefetch() {
  if (PresentGradients() == Present::kOurs) PrefetchTensor(shard_gradient_);
}

void GradientBuffer::Attach(const at::Tensor& flags, const Produced& produced) {
  Produced anywhere = produced;
  bool are_read = false;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    at::Tensor slice = parameter_->ShardSlice(i);
    // Frozen since a backward whose gradients were kept whole.
    if (!slice.requires_grad() || slice.grad().defined()) continue;
    if (!are_read && (anywhere.empty() || !anywhere[i])) {
      anywhere = ReadFlags(flags);
      are_read = true;
    }
    if (anywhere[i]) slice.mutable_grad() = GradientSlice(i);
  }
}

at::Tensor GradientBuffer::DropUnusedGradient() {
  if (PresentGradients() != Present::kNone) return {};
  at::Tensor taken;
  if (is_taken_over_ && shard_gradient_.storage().use_count() == 1) {
    taken = RangeOf(shard_gradient_, at::kByte, 0, bytes());
  }
  is_taken_over_ = false;
  shard_gradient_.reset();
  return taken;
}

void GradientBuffer::AccumulateSlice(int i, const at::Tensor& reduced,
                                     double scale) {
  const Slice slice = parameter_->layout().InShard(i, parameter_->rank());
  const at::Tensor source = RangeOf(reduced, slice.begin, slice.numel());
  at::Tensor gradient = parameter_->ShardSlice(i).grad();
  if (gradient.defined()) {
    gradient.add_(source, scale);
  } else {
    CopyScaled(GradientSlice(i), source, scale);
  }
}

}  // namespace fsdp
