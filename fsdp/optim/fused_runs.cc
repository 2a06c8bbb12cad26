#include "fsdp/optim/fused_runs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace fsdp {
namespace {

// A multiple of the vectors of Torch's CPU kernels.
constexpr int64_t kVectorBytes = 64;

int64_t VectorNumel(const at::Tensor& tensor) {
  return kVectorBytes / static_cast<int64_t>(tensor.element_size());
}

// Returns `numel` elements of the dense `tensor` from element `begin` on; they
// may extend into what follows it in memory.
at::Tensor Flat(const at::Tensor& tensor, int64_t begin, int64_t numel) {
  return tensor.as_strided({numel}, {1}, tensor.storage_offset() + begin);
}

char* Bytes(const at::Tensor& tensor, int64_t begin) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         begin * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

bool FollowsInMemory(const at::Tensor& before, const at::Tensor& tensor) {
  return before.storage().unsafeGetStorageImpl() ==
             tensor.storage().unsafeGetStorageImpl() &&
         before.storage_offset() + before.numel() == tensor.storage_offset();
}

bool FusedRuns::Part::operator==(const Part& other) const {
  return parameter == other.parameter && active == other.active &&
         joins == other.joins && mixed == other.mixed &&
         step_class == other.step_class;
}

void FusedRuns::Begin(absl::Span<const FusedSlice> slices, int num_slots,
                      bool convert_all) {
  // Only the kernels use these views: autograd need not know of them.
  const at::AutoDispatchBelowADInplaceOrView untracked;
  slices_ = slices;
  built_ = built_ && num_slots == num_slots_ && convert_all == convert_all_;
  num_slots_ = num_slots;
  convert_all_ = convert_all;
  classes_.clear();
  new_parts_.clear();
  const FusedSlice* before = nullptr;
  for (const FusedSlice& slice : slices_) {
    Part& part = new_parts_.emplace_back();
    if (!slice.gradient.defined() || slice.parameter.numel() == 0) continue;
    part.parameter = slice.parameter.const_data_ptr();
    part.active = true;
    part.mixed = slice.gradient.scalar_type() != slice.parameter.scalar_type();
    const auto found = std::find(classes_.begin(), classes_.end(), slice.step);
    part.step_class = static_cast<int>(found - classes_.begin());
    if (found == classes_.end()) classes_.push_back(slice.step);
    part.joins = before != nullptr && Joins(*before, slice);
    before = &slice;
  }
  if (!built_ || new_parts_ != parts_) {
    built_ = false;  // in case memory runs out
    parts_ = new_parts_;
    Rebuild();
    built_ = true;
  }
  for (size_t i = 0; i < whole_; ++i) {
    runs_[i].gradient = Flat(slices_[runs_[i].slice].gradient, offsets_[i],
                             runs_[i].parameter.numel());
  }
  CopyTails(/*in=*/true);
}

bool FusedRuns::Joins(const FusedSlice& before, const FusedSlice& slice) const {
  if (before.step != slice.step ||
      before.gradient.scalar_type() != slice.gradient.scalar_type() ||
      !FollowsInMemory(before.parameter, slice.parameter) ||
      !FollowsInMemory(before.gradient, slice.gradient)) {
    return false;
  }
  for (int k = 0; k < num_slots_; ++k) {
    if (!FollowsInMemory(before.slots[k], slice.slots[k])) return false;
  }
  return true;
}

void FusedRuns::Rebuild() {
  runs_.clear();
  offsets_.clear();
  tails_.clear();
  size_t i = 0;
  while (i < parts_.size()) {
    if (!parts_[i].active) {
      ++i;
      continue;
    }
    // Empty slices, which take no part, may lie between those of a run.
    size_t last = i;
    size_t next = i + 1;
    for (; next < parts_.size(); ++next) {
      if (!parts_[next].active) continue;
      if (!parts_[next].joins) break;
      last = next;
    }
    AddRun(i, last);
    i = next;
  }
  whole_ = runs_.size();
  Stage();
}

void FusedRuns::AddRun(size_t first, size_t last) {
  int64_t numel = 0;
  for (size_t i = first; i <= last; ++i) {
    if (parts_[i].active) numel += slices_[i].parameter.numel();
  }
  const at::Tensor& parameter = slices_[first].parameter;
  const int64_t vector = VectorNumel(parameter);
  const int64_t tail = parameter.is_cpu() ? numel % vector : 0;
  const int64_t whole = numel - tail;
  const bool converted = convert_all_ || parts_[first].mixed;
  const int64_t most = converted ? kConvertedNumel : whole;
  for (int64_t begin = 0; begin < whole; begin += most) {
    const int64_t piece = std::min(most, whole - begin);
    FusedRun& run = runs_.emplace_back();
    run.slice = first;
    run.parameter = Flat(parameter, begin, piece);
    for (int k = 0; k < num_slots_; ++k) {
      run.slots[k] = Flat(slices_[first].slots[k], begin, piece);
    }
    offsets_.push_back(begin);
  }
  if (tail > 0) tails_.push_back({first, whole, tail, /*staged=*/0});
}

// Makes a run of staging memory for each class of steps.
void FusedRuns::Stage() {
  staging_.reset();
  if (tails_.empty()) return;
  const at::Tensor& parameter = slices_[tails_.front().slice].parameter;
  const int64_t vector = VectorNumel(parameter);
  struct Range {
    int64_t begin, numel;
    size_t slice;
  };
  std::vector<Range> ranges;
  int64_t used = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    const int64_t begin = used;
    size_t slice = 0;
    for (Tail& tail : tails_) {
      if (parts_[tail.slice].step_class != static_cast<int>(c)) continue;
      tail.staged = used;
      used += tail.numel;
      slice = tail.slice;
    }
    if (used == begin) continue;
    used = (used + vector - 1) / vector * vector;
    ranges.push_back({begin, used - begin, slice});
  }
  staging_ = at::zeros({2 + num_slots_, used}, parameter.options());
  for (const Range& range : ranges) {
    FusedRun& run = runs_.emplace_back();
    run.slice = range.slice;
    const auto row = [&](int64_t k) {
      return staging_.select(0, k).narrow(0, range.begin, range.numel);
    };
    run.parameter = row(0);
    run.gradient = row(1);
    for (int k = 0; k < num_slots_; ++k) run.slots[k] = row(2 + k);
  }
}

void FusedRuns::CopyTails(bool in) {
  for (const Tail& tail : tails_) {
    const FusedSlice& slice = slices_[tail.slice];
    const size_t bytes = tail.numel * slice.parameter.element_size();
    const int64_t row = staging_.size(1);
    const auto copy = [&](const at::Tensor& tensor, int64_t k) {
      char* const own = Bytes(tensor, tail.begin);
      char* const staged = Bytes(staging_, k * row + tail.staged);
      std::memcpy(in ? staged : own, in ? own : staged, bytes);
    };
    copy(slice.parameter, 0);
    for (int k = 0; k < num_slots_; ++k) copy(slice.slots[k], 2 + k);
    if (!in) continue;
    if (parts_[tail.slice].mixed) {
      Flat(staging_, row + tail.staged, tail.numel)
          .copy_(Flat(slice.gradient, tail.begin, tail.numel));
    } else {
      copy(slice.gradient, 1);
    }
  }
}

void FusedRuns::End() {
  CopyTails(/*in=*/false);
  for (size_t i = 0; i < whole_; ++i) runs_[i].gradient.reset();
  slices_ = {};
}

}  // namespace fsdp
