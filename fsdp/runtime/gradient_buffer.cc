#include "fsdp/runtime/gradient_buffer.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "device_ops/pack.h"
#include "device_ops/streaming_copy.h"
#include "flat_param/layout.h"
#include "fsdp/runtime/gradient_layout.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::Slice;

// The ways around operators below are for tensors on the host, where calling
// one costs more than what it does to a few bytes.
constexpr size_t kFewBytes = 16 << 10;
// The gradients of a unit: by the time that they are reduced, other tensors of
// backward have taken their place in a core's caches.
constexpr int64_t kTooMuchForCaches = 4 << 20;
// Threads share copies of at least so many bytes each.
constexpr int64_t kGrainBytes = 256 << 10;

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

// For each flag of `layout`, whether it is to be 1.
std::vector<bool> Flags(const GradientLayout& layout,
                        absl::Span<const at::Tensor> gradients) {
  std::vector<bool> flags;
  for (int i : layout.parameters()) flags.push_back(gradients[i].defined());
  return flags;
}

// The flags of every rank and what follows them, in runs: a device is given
// each run as an argument.
void PackFlags(const GradientLayout& layout,
               absl::Span<const at::Tensor> gradients, bool adds,
               device_ops::Packing& packing) {
  const std::vector<bool> raised = Flags(layout, gradients);
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

// Into a buffer of `buffer_bytes`, which is read only when other ranks are as
// far.
void CopyGradient(const at::Tensor& source, double scale, int64_t buffer_bytes,
                  const at::Tensor& target) {
  const bool goes_past_caches =
      scale == 1 && buffer_bytes >= kTooMuchForCaches && target.is_cpu() &&
      source.is_cpu() && target.scalar_type() == source.scalar_type() &&
      target.nbytes() > kFewBytes;
  if (!goes_past_caches) return CopyScaled(target, source, scale);
  auto* const to = static_cast<char*>(target.mutable_data_ptr());
  const auto* const from = static_cast<const char*>(source.const_data_ptr());
  at::parallel_for(0, static_cast<int64_t>(target.nbytes()), kGrainBytes,
                   [&](int64_t begin, int64_t end) {
                     device_ops::StreamingCopy(to + begin, from + begin,
                                               end - begin);
                   });
}

// Whether nobody but the caller, who holds `gradient` once, can see the memory
// of `value`, which is all in which `gradient` lies, or a copy of it. A view
// holds what it is a view of.
bool HasMemoryToItself(const at::Tensor& value, const at::Tensor& gradient) {
  const c10::Storage& storage = value.storage();
  const auto lies_there = [&storage](const at::TensorBase& tensor) {
    return tensor.layout() == at::kStrided &&
           tensor.storage().unsafeGetStorageImpl() ==
               storage.unsafeGetStorageImpl();
  };
  if (value.storage_offset() != 0 || storage.nbytes() != value.nbytes()) {
    return false;
  }
  size_t holders = 1;
  if (lies_there(gradient)) {
    if (gradient.use_count() != 1) return false;
    ++holders;
    if (gradient.is_view()) {
      const at::TensorBase& base = gradient._base();
      if (base.use_count() != 1) return false;
      if (lies_there(base)) ++holders;
    }
  }
  return storage.use_count() == holders;
}

// Those of `gradients` that the buffer has.
void MarkProduced(absl::Span<const at::Tensor> gradients,
                  ReduceBuffer& buffer) {
  buffer.produced.resize(gradients.size());
  for (int i : buffer.layout->parameters()) {
    if (gradients[i].defined()) buffer.produced[i] = true;
  }
}

}  // namespace

int64_t ShardGradientBytes(const FlatLayout& layout,
                           const GradientBufferOptions& options) {
  const auto reduced =
      static_cast<int64_t>(c10::elementSize(options.reduce_dtype));
  const auto stored =
      static_cast<int64_t>(c10::elementSize(options.gradient_dtype));
  const std::vector<bool> all(layout.num_parameters(), true);
  return GradientLayout(layout, all, reduced).segment_numel() * stored;
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
    : parameter_(parameter), options_(options) {}

GradientBuffer::Layout GradientBuffer::CurrentLayout(const Layout& with) const {
  std::vector<bool> trained(parameter_->num_parameters());
  bool any = false;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    trained[i] = parameter_->ShardSlice(i).requires_grad() ||
                 (with != nullptr && with->trained()[i]);
    any |= trained[i];
  }
  if (!any) return nullptr;
  if (with != nullptr && with->trained() == trained) return with;
  if (layout_ == nullptr || layout_->trained() != trained) {
    layout_ = std::make_shared<const GradientLayout>(
        parameter_->layout(), std::move(trained),
        static_cast<int64_t>(c10::elementSize(options_.reduce_dtype)));
  }
  return layout_;
}

int64_t GradientBuffer::bytes() const {
  const Layout layout = CurrentLayout();
  return layout == nullptr ? 0 : layout->bytes();
}

int64_t GradientBuffer::shard_bytes() const {
  const Layout layout = CurrentLayout();
  if (layout == nullptr) return 0;
  return layout->segment_numel() *
         static_cast<int64_t>(c10::elementSize(options_.gradient_dtype));
}

at::Tensor GradientBuffer::Whole(const ReduceBuffer& buffer) const {
  return RangeOf(buffer.memory, options_.reduce_dtype, 0,
                 buffer.layout->numel());
}

at::Tensor GradientBuffer::OwnSegment(const ReduceBuffer& buffer) const {
  const int64_t numel = buffer.layout->segment_numel();
  const int64_t begin = buffer.is_segment ? 0 : parameter_->rank() * numel;
  return RangeOf(buffer.memory, options_.reduce_dtype, begin, numel);
}

void GradientBuffer::Fill(ReduceBuffer& buffer,
                          absl::Span<const at::Tensor> gradients) const {
  FSDP_CHECK(static_cast<int>(gradients.size()) ==
             parameter_->num_parameters());
  c10::NoGradGuard no_grad;
  buffer.produced.clear();
  MarkProduced(gradients, buffer);
  const at::Tensor whole = Whole(buffer);
  if (HasStreams(whole.device()))
    return PackInto(buffer, gradients, /*adds=*/false);
  for (const Slice& gap : buffer.layout->gaps()) SetToZero(whole, gap);
  for (int i : buffer.layout->parameters()) {
    FillParameter(*buffer.layout, whole, i, gradients[i]);
  }
  WriteFlags(buffer, gradients);
}

void GradientBuffer::WriteFlags(const ReduceBuffer& buffer,
                                absl::Span<const at::Tensor> gradients) const {
  const GradientLayout& layout = *buffer.layout;
  const at::Tensor whole = Whole(buffer);
  const std::vector<bool> raised = Flags(layout, gradients);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, whole.scalar_type(), "WriteFlags", [&] {
        scalar_t* const data = whole.mutable_data_ptr<scalar_t>();
        for (int rank = 0; rank < layout.world_size(); ++rank) {
          scalar_t* const segment = data + rank * layout.segment_numel();
          scalar_t* const flags = segment + layout.gradients_numel();
          std::fill(flags, segment + layout.segment_numel(), scalar_t(0));
          for (size_t k = 0; k < raised.size(); ++k) {
            if (raised[k]) flags[k] = scalar_t(1);
          }
        }
      });
}

void GradientBuffer::RaiseFlags(const ReduceBuffer& buffer,
                                absl::Span<const at::Tensor> gradients) const {
  const GradientLayout& layout = *buffer.layout;
  const at::Tensor whole = Whole(buffer);
  const std::vector<bool> raised = Flags(layout, gradients);
  auto begin = std::find(raised.begin(), raised.end(), true);
  while (begin != raised.end()) {
    const auto end = std::find(begin, raised.end(), false);
    whole
        .as_strided({layout.world_size(), end - begin},
                    {layout.segment_numel(), 1},
                    whole.storage_offset() + layout.gradients_numel() +
                        (begin - raised.begin()))
        .fill_(1);
    begin = std::find(end, raised.end(), true);
  }
}

void GradientBuffer::Add(ReduceBuffer& buffer,
                         absl::Span<const at::Tensor> gradients) const {
  c10::NoGradGuard no_grad;
  MarkProduced(gradients, buffer);
  const at::Tensor whole = Whole(buffer);
  if (HasStreams(whole.device()))
    return PackInto(buffer, gradients, /*adds=*/true);
  for (int i : buffer.layout->parameters()) {
    if (gradients[i].defined()) {
      AddParameter(*buffer.layout, whole, i, gradients[i]);
    }
  }
  RaiseFlags(buffer, gradients);
}

void GradientBuffer::Convert(const ReduceBuffer& from, ReduceBuffer& to) const {
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

void GradientBuffer::AddSegment(const ReduceBuffer& from,
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

// Those that both have, with their flags: of all ranks, or of the segment.
void GradientBuffer::CopyParameters(const ReduceBuffer& from, ReduceBuffer& to,
                                    bool adds) const {
  const auto segment_of = [this](const ReduceBuffer& buffer, int rank) {
    if (buffer.is_segment) return OwnSegment(buffer);
    const int64_t numel = buffer.layout->segment_numel();
    return RangeOf(buffer.memory, options_.reduce_dtype, rank * numel, numel);
  };
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
      const at::Tensor source = segment_of(from, rank);
      const at::Tensor target = segment_of(to, rank);
      copy(RangeOf(target, flag_of(*to.layout, i), 1),
           RangeOf(source, flag_of(*from.layout, i), 1));
      const Slice old = from.layout->InSegment(i, rank);
      if (old.empty()) continue;
      copy(RangeOf(target, to.layout->InSegment(i, rank).begin, old.numel()),
           RangeOf(source, old.begin, old.numel()));
    }
  }
}

// A device does it in as few launches as there can be.
void GradientBuffer::PackInto(const ReduceBuffer& buffer,
                              absl::Span<const at::Tensor> gradients,
                              bool adds) const {
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
  if (adds) {
    return device_ops::PackAdd(whole, sources, packing,
                               options_.scaling.before);
  }
  for (const Slice& gap : layout.gaps()) packing.AddZeros(gap.begin, gap.end);
  device_ops::Pack(whole, sources, packing, options_.scaling.before);
}

void GradientBuffer::AddParameter(const GradientLayout& layout,
                                  const at::Tensor& whole, int i,
                                  const at::Tensor& gradient) const {
  const at::Tensor source =
      flat_param::StorageOrderOf(gradient, parameter_->layout().parameter(i));
  const Slice ranks = layout.RanksOf(i);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    const Slice slice = layout.InSegment(i, static_cast<int>(rank));
    const Slice part =
        parameter_->layout().InParameter(i, static_cast<int>(rank));
    RangeOf(whole, rank * layout.segment_numel() + slice.begin, slice.numel())
        .add_(RangeOf(source, part.begin, part.numel()),
              options_.scaling.before);
  }
}

void GradientBuffer::FillParameter(const GradientLayout& layout,
                                   const at::Tensor& whole, int i,
                                   const at::Tensor& gradient) const {
  at::Tensor source;
  if (gradient.defined()) {
    source =
        flat_param::StorageOrderOf(gradient, parameter_->layout().parameter(i));
  }
  // Nobody has saved the buffer for a backward, so no version has to count.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Slice ranks = layout.RanksOf(i);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
    const int64_t base = rank * layout.segment_numel();
    const Slice slice = layout.InSegment(i, static_cast<int>(rank));
    const Slice target = {base + slice.begin, base + slice.end};
    if (gradient.defined()) {
      const Slice part =
          parameter_->layout().InParameter(i, static_cast<int>(rank));
      CopyGradient(RangeOf(source, part.begin, part.numel()),
                   options_.scaling.before, layout.bytes(),
                   RangeOf(whole, target.begin, target.numel()));
    } else {
      SetToZero(whole, target);
    }
  }
}

at::Tensor GradientBuffer::GradientSlice(int i) const {
  const Slice slice = shard_layout_->InSegment(i, parameter_->rank());
  return RangeOf(shard_gradient_, slice.begin, slice.numel());
}

bool GradientBuffer::HoldsOurs(int i) const {
  const at::Tensor& gradient = parameter_->ShardSlice(i).grad();
  return gradient.defined() && shard_gradient_.defined() &&
         gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() ==
             shard_gradient_.storage().unsafeGetStorageImpl();
}

// What is trained may have changed since gradients were attached: ours move to
// where they lie now, and those of what is frozen to memory of their own.
absl::Status GradientBuffer::SetShardLayout(const Layout& layout) {
  if (shard_layout_ == nullptr ||
      shard_layout_->trained() == layout->trained()) {
    shard_layout_ = layout;
    return absl::OkStatus();
  }
  FSDP_CHECK(direct_.empty());
  std::vector<std::pair<int, at::Tensor>> ours;
  {
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(shard_gradient_, Use::kRead));
    for (int i = 0; i < parameter_->num_parameters(); ++i) {
      if (!HoldsOurs(i)) continue;
      ours.emplace_back(i, parameter_->ShardSlice(i).grad().clone());
    }
  }
  for (const auto& [i, value] : ours) {
    parameter_->ShardSlice(i).mutable_grad() = value;
  }
  shard_layout_ = layout;
  shard_gradient_.reset();
  is_taken_over_ = false;
  RenewMemory(Present::kNone);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard_gradient_, Use::kOverwrite));
  for (const auto& [i, value] : ours) {
    if (!layout->trained()[i]) continue;
    const at::Tensor slice = GradientSlice(i);
    slice.copy_(value);
    parameter_->ShardSlice(i).mutable_grad() = slice;
  }
  return absl::OkStatus();
}

absl::Status GradientBuffer::AccumulateMean(const ReduceBuffer& buffer) {
  c10::NoGradGuard no_grad;
  const GradientLayout& layout = *buffer.layout;
  const double scale = options_.scaling.after;
  const at::Tensor segment = OwnSegment(buffer);
  const at::Tensor reduced = RangeOf(segment, 0, layout.gradients_numel());
  FSDP_RETURN_IF_ERROR(SetShardLayout(buffer.layout));
  const Present present = PresentGradients(layout);
  if (present == Present::kOthers) {
    for (int i : layout.parameters()) AccumulateSlice(i, reduced, scale);
    return absl::OkStatus();
  }
  RenewMemory(present);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard_gradient_, UseFor(present)));
  at::Tensor gradient = RangeOf(shard_gradient_, 0, layout.gradients_numel());
  switch (present) {
    case Present::kNone:
      CopyScaled(gradient, reduced, scale);
      break;
    case Present::kOurs:
      gradient.add_(reduced, scale);
      break;
    case Present::kMixed:
    case Present::kOthers:
      for (int i : layout.parameters()) AccumulateSlice(i, reduced, scale);
      break;
  }
  Attach(buffer.produced,
         RangeOf(segment, layout.gradients_numel(), layout.num_flags()));
  return absl::OkStatus();
}

bool GradientBuffer::TakeOver(ReduceBuffer& buffer) {
  const GradientLayout& layout = *buffer.layout;
  const bool is_plain_copy =
      layout.world_size() == 1 && !buffer.is_segment &&
      options_.memory == nullptr && options_.scaling.after == 1 &&
      options_.reduce_dtype == options_.gradient_dtype &&
      static_cast<int64_t>(buffer.memory.nbytes()) == layout.bytes();
  if (!is_plain_copy || PresentGradients(layout) != Present::kNone) {
    return false;
  }
  c10::NoGradGuard no_grad;
  at::Tensor former;
  if (shard_gradient_.defined() && shard_gradient_.storage().use_count() == 1 &&
      shard_layout_->bytes() == layout.bytes()) {
    former = RangeOf(shard_gradient_, at::kByte, 0, layout.bytes());
  }
  shard_gradient_ = OwnSegment(buffer);
  shard_layout_ = buffer.layout;
  is_taken_over_ = true;
  buffer.memory = std::move(former);
  Attach(buffer.produced, RangeOf(shard_gradient_, layout.gradients_numel(),
                                  layout.num_flags()));
  return true;
}

at::Tensor GradientBuffer::GiveUnused() {
  return is_taken_over_ ? DropUnusedGradient() : at::Tensor();
}

bool GradientBuffer::TakesGradients() const {
  return parameter_->layout().world_size() == 1 && options_.memory == nullptr &&
         options_.scaling.before == 1 && options_.scaling.after == 1 &&
         options_.reduce_dtype == options_.gradient_dtype &&
         RestingMemory::Of(parameter_->shard()) == nullptr;
}

bool GradientBuffer::Take(absl::Span<const at::Tensor> gradients) {
  FSDP_CHECK(static_cast<int>(gradients.size()) ==
             parameter_->num_parameters());
  const bool is_possible =
      TakesGradients() &&
      std::all_of(gradients.begin(), gradients.end(),
                  [this](const at::Tensor& gradient) {
                    return !gradient.defined() ||
                           gradient.scalar_type() == options_.gradient_dtype;
                  });
  if (!is_possible) return false;
  c10::NoGradGuard no_grad;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    const bool is_trained = parameter_->ShardSlice(i).requires_grad();
    if (is_trained && gradients[i].defined()) TakeOne(i, gradients[i]);
  }
  // What gradients of another kind of backward have left.
  if (shard_gradient_.defined()) DropUnusedGradient();
  return true;
}

void GradientBuffer::TakeOne(int i, const at::Tensor& gradient) const {
  const at::Tensor value =
      flat_param::StorageOrderOf(gradient, parameter_->layout().parameter(i));
  at::Tensor slice = parameter_->ShardSlice(i);
  at::Tensor present = slice.grad();
  if (present.defined()) {
    present.add_(value);
  } else {
    slice.mutable_grad() =
        HasMemoryToItself(value, gradient) ? value : value.clone();
  }
}

// Where a slice has a gradient of the user's own, ours next to it stays.
Use GradientBuffer::UseFor(Present present) {
  return present == Present::kNone ? Use::kOverwrite : Use::kUpdate;
}

GradientBuffer::Present GradientBuffer::PresentGradients(
    const GradientLayout& layout) const {
  const int all = layout.num_flags();
  int defined = 0;
  int ours = 0;
  for (int i : layout.parameters()) {
    if (parameter_->ShardSlice(i).grad().defined()) ++defined;
    if (HoldsOurs(i)) ++ours;
  }
  if (defined == 0) return Present::kNone;
  if (ours == all) return Present::kOurs;
  return defined == all && ours == 0 ? Present::kOthers : Present::kMixed;
}

// Memory that a gradient of the user's own keeping still refers to is left to
// it, as a new gradient from LibTorch would.
void GradientBuffer::RenewMemory(Present present) {
  if (options_.memory != nullptr) {
    shard_gradient_ =
        RangeOf(options_.memory->AsTensor(options_.gradient_dtype), 0,
                shard_layout_->segment_numel());
    return;
  }
  if (shard_gradient_.defined() &&
      (present != Present::kNone ||
       shard_gradient_.storage().use_count() == 1)) {
    return;
  }
  is_taken_over_ = false;
  shard_gradient_ =
      at::empty({shard_layout_->segment_numel()},
                parameter_->shard().options().dtype(options_.gradient_dtype));
}

absl::StatusOr<std::optional<GradientBuffer::DirectTarget>>
GradientBuffer::StartDirect(const Layout& layout) {
  std::optional<DirectTarget> target;
  if (!direct_.empty() && shard_layout_->trained() != layout->trained()) {
    return target;
  }
  FSDP_RETURN_IF_ERROR(SetShardLayout(layout));
  Present present = PresentGradients(*layout);
  if (present == Present::kMixed || present == Present::kOthers) {
    return target;
  }
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
  Attach(produced, RangeOf(shard_gradient_, shard_layout_->gradients_numel(),
                           shard_layout_->num_flags()));
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
  if (shard_layout_ != nullptr &&
      PresentGradients(*shard_layout_) == Present::kOurs) {
    PrefetchTensor(shard_gradient_);
  }
}

// `flags` are of the shard's layout.
void GradientBuffer::Attach(const Produced& produced, const at::Tensor& flags) {
  Produced raised;
  for (size_t k = 0; k < shard_layout_->parameters().size(); ++k) {
    const int i = shard_layout_->parameters()[k];
    at::Tensor slice = parameter_->ShardSlice(i);
    // Frozen since the buffer was filled.
    if (!slice.requires_grad() || slice.grad().defined()) continue;
    bool anywhere = !produced.empty() && produced[i];
    if (!anywhere) {
      if (raised.empty()) {
        raised = ReadFlags(flags);
        ++flag_reads_;
      }
      anywhere = raised[k];
    }
    if (anywhere) slice.mutable_grad() = GradientSlice(i);
  }
}

at::Tensor GradientBuffer::DropUnusedGradient() {
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    if (HoldsOurs(i)) return {};
  }
  at::Tensor taken;
  if (is_taken_over_ && shard_gradient_.storage().use_count() == 1) {
    taken = RangeOf(shard_gradient_, at::kByte, 0, shard_layout_->bytes());
  }
  is_taken_over_ = false;
  shard_gradient_.reset();
  return taken;
}

void GradientBuffer::AccumulateSlice(int i, const at::Tensor& reduced,
                                     double scale) {
  const Slice slice = shard_layout_->InSegment(i, parameter_->rank());
  const at::Tensor source = RangeOf(reduced, slice.begin, slice.numel());
  at::Tensor gradient = parameter_->ShardSlice(i).grad();
  if (gradient.defined()) {
    gradient.add_(source, scale);
  } else {
    CopyScaled(GradientSlice(i), source, scale);
  }
}

}  // namespace fsdp
