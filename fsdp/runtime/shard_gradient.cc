#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "device_ops/pack.h"
#include "flat_param/layout.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::Slice;

Produced ReadFlags(const at::Tensor& source) {
  const at::Tensor raised = source.cpu().ne(0);
  const bool* const flags = raised.const_data_ptr<bool>();
  return Produced(flags, flags + raised.numel());
}

// Returns whether only the caller, who holds `gradient` once, can see the
// memory of `value`, which is `gradient` or a copy of it and must fill its
// storage. A view holds its base.
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

}  // namespace

at::Tensor FlatGradients::GradientSlice(int i) const {
  const Slice slice = layout_->InSegment(i, parameter_->rank());
  return RangeOf(values_, slice.begin, slice.numel());
}

bool FlatGradients::HoldsOurs(int i) const {
  const at::Tensor& gradient = parameter_->ShardSlice(i).grad();
  return gradient.defined() && values_.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() ==
             values_.storage().unsafeGetStorageImpl();
}

// If the trained parameters have changed since gradients were attached, our
// gradients move to their places in `layout`, and those of frozen parameters to
// memory of their own.
absl::Status FlatGradients::SetLayout(const Layout& layout) {
  if (layout_ == nullptr || layout_->trained() == layout->trained()) {
    layout_ = layout;
    return absl::OkStatus();
  }
  FSDP_CHECK(direct_.empty());
  std::vector<std::pair<int, at::Tensor>> ours;
  {
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(values_, Use::kRead));
    for (int i = 0; i < parameter_->num_parameters(); ++i) {
      if (!HoldsOurs(i)) continue;
      ours.emplace_back(i, parameter_->ShardSlice(i).grad().clone());
    }
  }
  for (const auto& [i, value] : ours) {
    parameter_->ShardSlice(i).mutable_grad() = value;
  }
  layout_ = layout;
  values_.reset();
  is_taken_over_ = false;
  RenewMemory(Present::kNone);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(values_, Use::kOverwrite));
  for (const auto& [i, value] : ours) {
    if (!layout->trained()[i]) continue;
    const at::Tensor slice = GradientSlice(i);
    slice.copy_(value);
    parameter_->ShardSlice(i).mutable_grad() = slice;
  }
  return absl::OkStatus();
}

absl::Status FlatGradients::AccumulateMean(const ReduceBuffer& buffer) {
  c10::NoGradGuard no_grad;
  const GradientLayout& layout = *buffer.layout;
  const double scale = options_.scaling.after;
  const at::Tensor segment = OwnSegment(buffer);
  const at::Tensor reduced = RangeOf(segment, 0, layout.gradients_numel());
  FSDP_RETURN_IF_ERROR(SetLayout(buffer.layout));
  const Present present = PresentGradients(layout);
  if (present == Present::kOthers) {
    for (int i : layout.parameters()) AccumulateSlice(i, reduced, scale);
    return absl::OkStatus();
  }
  RenewMemory(present);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(values_, UseFor(present)));
  at::Tensor gradient = RangeOf(values_, 0, layout.gradients_numel());
  if (present == Present::kNone) {
    device_ops::CopyScaled(gradient, reduced, scale);
  } else if (present == Present::kOurs) {
    gradient.add_(reduced, scale);
  } else {
    for (int i : layout.parameters()) AccumulateSlice(i, reduced, scale);
  }
  Attach(buffer.produced,
         RangeOf(segment, layout.gradients_numel(), layout.num_flags()));
  return absl::OkStatus();
}

bool FlatGradients::TakeOver(ReduceBuffer& buffer) {
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
  if (values_.defined() && values_.storage().use_count() == 1 &&
      layout_->bytes() == layout.bytes()) {
    former = RangeOf(values_, at::kByte, 0, layout.bytes());
  }
  values_ = OwnSegment(buffer);
  layout_ = buffer.layout;
  is_taken_over_ = true;
  buffer.memory = std::move(former);
  Attach(buffer.produced,
         RangeOf(values_, layout.gradients_numel(), layout.num_flags()));
  return true;
}

at::Tensor FlatGradients::GiveUnused() {
  return is_taken_over_ ? DropUnused() : at::Tensor();
}

bool FlatGradients::TakesGradients() const {
  return parameter_->layout().world_size() == 1 && options_.memory == nullptr &&
         options_.scaling.before == 1 && options_.scaling.after == 1 &&
         options_.reduce_dtype == options_.gradient_dtype &&
         RestingMemory::Of(parameter_->shard()) == nullptr;
}

bool FlatGradients::Take(absl::Span<const at::Tensor> gradients) {
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
    at::Tensor slice = parameter_->ShardSlice(i);
    if (!slice.requires_grad() || !gradients[i].defined()) continue;
    const at::Tensor value = flat_param::StorageOrderOf(
        gradients[i], parameter_->layout().parameter(i));
    const at::Tensor& present = slice.grad();
    if (present.defined()) {
      present.add_(value);
    } else {
      slice.mutable_grad() =
          HasMemoryToItself(value, gradients[i]) ? value : value.clone();
    }
  }
  // Frees what a backward that reduced into `values_` has left.
  if (values_.defined()) DropUnused();
  return true;
}

// If a slice has a gradient of the user's, ours in the same memory stay.
Use FlatGradients::UseFor(Present present) {
  return present == Present::kNone ? Use::kOverwrite : Use::kUpdate;
}

FlatGradients::Present FlatGradients::PresentGradients(
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

// Like LibTorch with a new gradient, leaves the memory to a gradient that the
// user has kept.
void FlatGradients::RenewMemory(Present present) {
  if (options_.memory != nullptr) {
    values_ = RangeOf(options_.memory->AsTensor(options_.gradient_dtype), 0,
                      layout_->segment_numel());
    return;
  }
  if (values_.defined() &&
      (present != Present::kNone || values_.storage().use_count() == 1)) {
    return;
  }
  is_taken_over_ = false;
  values_ =
      at::empty({layout_->segment_numel()},
                parameter_->shard().options().dtype(options_.gradient_dtype));
}

absl::StatusOr<std::optional<FlatGradients::DirectTarget>>
FlatGradients::StartDirect(const Layout& layout) {
  std::optional<DirectTarget> target;
  if (!direct_.empty() && layout_->trained() != layout->trained()) {
    return target;
  }
  FSDP_RETURN_IF_ERROR(SetLayout(layout));
  Present present = PresentGradients(*layout);
  if (present == Present::kMixed || present == Present::kOthers) {
    return target;
  }
  // On a device, an abandoned backward may still add to the gradients.
  const bool is_fresh = present == Present::kNone && direct_.empty() &&
                        options_.memory == nullptr;
  if (HasStreams(parameter_->shard().device()) && !is_fresh) return target;
  // The reductions in flight will attach these slices.
  if (!direct_.empty()) present = Present::kOurs;
  RenewMemory(present);
  FSDP_ASSIGN_OR_RETURN(Resident resident,
                        Resident::Of(values_, UseFor(present)));
  direct_.push_back(std::move(resident));
  target = DirectTarget{values_,
                        {options_.scaling.after, present == Present::kOurs}};
  return target;
}

void FlatGradients::FinishDirect(const Produced& produced) {
  FSDP_CHECK(!direct_.empty());
  c10::NoGradGuard no_grad;
  Attach(produced,
         RangeOf(values_, layout_->gradients_numel(), layout_->num_flags()));
  direct_.pop_front();
}

void FlatGradients::ForgetDirect() {
  if (direct_.empty()) return;
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    if (HoldsOurs(i)) parameter_->ShardSlice(i).mutable_grad().reset();
  }
  for (Resident& resident : direct_) abandoned_.push_back(std::move(resident));
  direct_.clear();
  values_.reset();
  is_taken_over_ = false;
}

void FlatGradients::Prefetch() {
  if (layout_ != nullptr && PresentGradients(*layout_) == Present::kOurs) {
    PrefetchTensor(values_);
  }
}

// `flags` must have the layout of the shard.
void FlatGradients::Attach(const Produced& produced, const at::Tensor& flags) {
  Produced raised;
  for (size_t k = 0; k < layout_->parameters().size(); ++k) {
    const int i = layout_->parameters()[k];
    at::Tensor slice = parameter_->ShardSlice(i);
    // Either frozen since the buffer was filled, or attached already.
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

at::Tensor FlatGradients::DropUnused() {
  for (int i = 0; i < parameter_->num_parameters(); ++i) {
    if (HoldsOurs(i)) return {};
  }
  at::Tensor taken;
  if (is_taken_over_ && values_.storage().use_count() == 1) {
    taken = RangeOf(values_, at::kByte, 0, layout_->bytes());
  }
  is_taken_over_ = false;
  values_.reset();
  return taken;
}

void FlatGradients::AccumulateSlice(int i, const at::Tensor& reduced,
                                    double scale) {
  const Slice slice = layout_->InSegment(i, parameter_->rank());
  const at::Tensor source = RangeOf(reduced, slice.begin, slice.numel());
  at::Tensor gradient = parameter_->ShardSlice(i).grad();
  if (gradient.defined()) {
    gradient.add_(source, scale);
  } else {
    device_ops::CopyScaled(GradientSlice(i), source, scale);
  }
}

absl::Status ReduceMemory::Collect(FlatGradients& of,
                                   absl::Span<const at::Tensor> gradients,
                                   const FlatGradients::Layout& layout,
                                   bool may_take, ReduceBuffer& buffer) {
  // Gives the buffer the layout, and keeps its gradients.
  const bool is_same = buffer.layout == layout ||
                       (buffer.layout != nullptr && layout != nullptr &&
                        buffer.layout->trained() == layout->trained());
  if (!is_same) {
    ReduceBuffer next = {layout, {}};
    if (buffer.has_gradients() && layout != nullptr) {
      FSDP_ASSIGN_OR_RETURN(next.memory, Acquire(layout->bytes()));
      of.Convert(buffer, next);
    }
    DropKept(buffer);
    buffer = std::move(next);
  }
  if (layout == nullptr || gradients.empty()) return absl::OkStatus();
  if (buffer.has_gradients()) {
    of.Add(buffer, gradients);
    return absl::OkStatus();
  }
  // One step's gradient becomes the next one's buffer, on the same stream.
  if (may_take) {
    const at::Tensor unused = of.GiveUnused();
    if (unused.defined()) Adopt(unused, DeviceEvent());
  }
  FSDP_ASSIGN_OR_RETURN(buffer.memory, Acquire(layout->bytes()));
  of.Fill(buffer, gradients);
  return absl::OkStatus();
}

absl::Status ReduceMemory::AddToSums(const FlatGradients& of,
                                     const ReduceBuffer& buffer,
                                     ReduceBuffer& sums) {
  const bool has_sums = sums.has_gradients();
  if (!has_sums || sums.layout->trained() != buffer.layout->trained()) {
    ReduceBuffer next;
    next.layout = has_sums ? of.CurrentLayout(sums.layout) : buffer.layout;
    next.is_segment = true;
    FSDP_ASSIGN_OR_RETURN(next.memory, Acquire(next.layout->segment_bytes()));
    of.Convert(has_sums ? sums : buffer, next);
    if (has_sums) GiveBack(sums, /*reader=*/nullptr);
    sums = std::move(next);
    if (!has_sums) return absl::OkStatus();
  }
  of.AddSegment(buffer, sums);
  return absl::OkStatus();
}

void ReduceMemory::GiveBack(ReduceBuffer& buffer,
                            std::unique_ptr<comm::Work> reader) {
  DeviceEvent read;
  read.Record(device_);
  BufferPool::AwaitReader await_reader;
  if (reader != nullptr) {
    await_reader = [reader = std::move(reader)] {
      return reader->BlockCurrentStream();
    };
  }
  Release(buffer.memory, std::move(await_reader), std::move(read));
  buffer.memory.reset();
}

void ReduceMemory::DropKept(ReduceBuffer& buffer) {
  if (buffer.has_gradients()) Release(buffer.memory);
  buffer = ReduceBuffer();
}

void ReduceMemory::TakeBytes(const at::Tensor& memory) {
  if (!memory.defined()) return;
  DeviceEvent used;
  used.Record(device_);
  Adopt(memory, std::move(used));
}

}  // namespace fsdp
