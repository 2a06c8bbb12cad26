#include "fsdp/runtime/reducer.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
namespace {

// Returns the group whose collective is the first to read packed gradients.
const RuntimeCommon::Group& ReducedBy(const Placement& placement) {
  const bool is_replicated_only =
      placement.shard->world_size() == 1 && placement.replicate != nullptr;
  return is_replicated_only ? placement.replicate : placement.shard;
}

// Visits the slices that have a gradient.
void ForEachGradient(const RuntimeUnit& unit,
                     absl::FunctionRef<void(const at::Tensor&)> visit) {
  for (const RuntimeFlat& parameter : unit.flats) {
    for (int i = 0; i < parameter->num_parameters(); ++i) {
      const at::Tensor& slice = parameter->ShardSlice(i);
      if (slice.grad().defined()) visit(slice);
    }
  }
}

}  // namespace

Reducer::Reducer(RuntimeCommon& common)
    : common_(common),
      stream_(common.device(), SideStream::Priority::kHigh),
      memory_(common.AllocateBy(&ReducedBy), common.device()) {
  for (const RuntimeUnit& unit : common_.units()) {
    labels_.emplace_back(unit.flats.size());
    std::vector<Flat>& flats = flats_.emplace_back();
    for (const RuntimeFlat& flat : unit.flats) {
      flats.push_back({static_cast<size_t>(flat->num_parameters()),
                       FlatGradients(&*flat, flat.gradients)});
    }
  }
  ChooseStreams();
}

int64_t Reducer::reduce_buffer_bytes(int unit) const {
  int64_t bytes = 0;
  for (const Flat& flat : flats_[unit]) bytes += flat.gradients.bytes();
  return bytes;
}

int64_t Reducer::flag_reads(int unit) const {
  int64_t reads = 0;
  for (const Flat& flat : flats_[unit]) {
    reads += flat.gradients.flag_reads();
  }
  return reads;
}

std::vector<const void*> Reducer::Addresses(int unit) const {
  std::vector<const void*> addresses;
  for (const Reduction& reduction : reductions_) {
    if (reduction.unit != unit) continue;
    for (const ReduceBuffer& buffer : reduction.buffers) {
      addresses.push_back(
          buffer.has_gradients() ? buffer.memory.const_data_ptr() : nullptr);
    }
  }
  return addresses;
}

void Reducer::SetScaling(GradientScaling scaling) {
  scaling_ = scaling;
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.gradients.SetScaling(scaling);
  }
  ChooseStreams();
}

class Reducer::BesideScope {
 public:
  BesideScope(Reducer& reducer, bool has_work) {
    if (!has_work) return;
    reducer.stream_.FollowCurrentStream();
    scope_.emplace(reducer.stream_);
    reducer.has_reduced_beside_ = true;
  }

 private:
  std::optional<SideStream::Scope> scope_;
};

void Reducer::EndOfBackward() {
  if (std::exchange(has_reduced_beside_, false)) {
    stream_.BlockCurrentStream();
  }
}

// A unit whose flat parameters all take gradients as they are reduces on the
// computing stream, which owns that memory, even for what is not trained yet.
// With a step hook, all units reduce on the side stream if one does: optimizers
// have memory of their own, so steps share one stream.
void Reducer::ChooseStreams() {
  reduces_beside_.assign(common_.num_units(), false);
  bool any = false;
  for (int unit = 0; unit < common_.num_units(); ++unit) {
    const bool stays = IsAlone(unit) &&
                       std::all_of(flats_[unit].begin(), flats_[unit].end(),
                                   [](const Flat& flat) {
                                     return flat.gradients.shard_bytes() == 0 ||
                                            flat.gradients.TakesGradients();
                                   });
    if (!stays) reduces_beside_[unit] = any = true;
  }
  if (any && hooks_.step) reduces_beside_.assign(common_.num_units(), true);
}

void Reducer::SetHooks(RuntimeHooks hooks) {
  hooks_ = std::move(hooks);
  const bool reduces = hooks_.reduce_scatter || hooks_.all_reduce;
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      const GradientScaling scaling = flat.gradients.scaling();
      if (!reduces || !scaling.before_for_speed) continue;
      flat.gradients.SetScaling({1, scaling.before * scaling.after});
    }
  }
  ChooseStreams();
}

bool Reducer::TakesGradients(int unit, int i) const {
  return !reduces_beside_[unit] && flats_[unit][i].gradients.TakesGradients();
}

// The layout also has what earlier backwards trained, which may be trained
// again when it is reduced. A unit that is alone reuses the memory of one
// step's gradient for the next step's buffer.
absl::Status Reducer::Accumulate(int unit,
                                 absl::Span<const at::Tensor> gradients) {
  size_t first = 0;
  for (Flat& flat : flats_[unit]) {
    FSDP_RETURN_IF_ERROR(memory_.Collect(
        flat.gradients, gradients.subspan(first, flat.num_parameters),
        flat.gradients.CurrentLayout(flat.whole_gradients.layout),
        IsAlone(unit), flat.whole_gradients));
    first += flat.num_parameters;
  }
  return absl::OkStatus();
}

absl::Status Reducer::FillReduceBuffer(int unit,
                                       absl::Span<const at::Tensor> gradients) {
  Reduction& reduction = reductions_.emplace_back();
  reduction.unit = unit;
  size_t first = 0;
  for (Flat& flat : flats_[unit]) {
    ReduceBuffer& buffer = reduction.buffers.emplace_back();
    buffer = std::exchange(flat.whole_gradients, ReduceBuffer());
    flat.gradients.Prefetch();
    absl::Span<const at::Tensor> own = gradients;
    if (!gradients.empty()) {
      own = gradients.subspan(first, flat.num_parameters);
      first += flat.num_parameters;
    }
    const bool may_take =
        !reduces_beside_[unit] && !own.empty() && !buffer.has_gradients();
    if (may_take && flat.gradients.Take(own)) {
      if (hooks_.step) awaits_step_.insert(unit);
      continue;
    }
    FSDP_RETURN_IF_ERROR(memory_.Collect(flat.gradients, own,
                                         flat.gradients.CurrentLayout(),
                                         IsAlone(unit), buffer));
  }
  return absl::OkStatus();
}

absl::Status Reducer::Reduce(int unit) {
  const BesideScope beside(*this,
                           common_.placement(unit).shard->world_size() > 1);
  Reduction& reduction = reductions_.back();
  FSDP_CHECK(reduction.unit == unit && reduction.works.empty());
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    FSDP_RETURN_IF_ERROR(ReduceFlat(unit, i, reduction));
  }
  reduction.is_sound = true;
  return absl::OkStatus();
}

// Returns false if the sum is changed on its way, or if an earlier reduction of
// the unit, still in flight, is to change the gradient.
bool Reducer::ReducesDirectly(int unit, size_t i) const {
  const Placement& placement = common_.placement(unit);
  if (hooks_.reduce_scatter || placement.replicate != nullptr ||
      placement.shard->world_size() == 1) {
    return false;
  }
  return std::all_of(reductions_.begin(), std::prev(reductions_.end()),
                     [&](const Reduction& earlier) {
                       return earlier.unit != unit || earlier.direct[i];
                     });
}

absl::Status Reducer::ReduceFlat(int unit, size_t i, Reduction& reduction) {
  Flat& flat = flats_[unit][i];
  const ReduceBuffer& buffer = reduction.buffers[i];
  std::unique_ptr<comm::Work>& work = reduction.works.emplace_back();
  reduction.direct.push_back(false);
  const Placement& placement = common_.placement(unit);
  if (!buffer.has_gradients() || placement.shard->world_size() == 1) {
    return absl::OkStatus();
  }
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReduce, unit, label, buffer.layout->bytes(),
                      flat.gradients.options().reduce_dtype);
  const at::Tensor own = flat.gradients.OwnSegment(buffer);
  const at::Tensor whole = flat.gradients.Whole(buffer);
  if (hooks_.reduce_scatter) {
    FSDP_ASSIGN_OR_RETURN(
        work, hooks_.reduce_scatter(
                  {common_.label(unit, i), *placement.shard, whole, own}));
    return absl::OkStatus();
  }
  std::optional<FlatGradients::DirectTarget> target;
  if (ReducesDirectly(unit, i)) {
    FSDP_ASSIGN_OR_RETURN(target, flat.gradients.StartDirect(buffer.layout));
  }
  FSDP_ASSIGN_OR_RETURN(
      work, target ? placement.traffic().ReduceScatterScaled(target->out, whole,
                                                             target->sum, label)
                   : placement.traffic().ReduceScatter(
                         own, whole, comm::ReduceOp::kSum, label));
  reduction.direct[i] = target.has_value();
  return absl::OkStatus();
}

// Returns a label that names the set of trained parameters. Ranks with
// different sets may have segments of one length, so groups compare labels.
const std::string& Reducer::Label(int unit, size_t i,
                                  const GradientLayout& layout) {
  const std::vector<bool>& trained = layout.trained();
  const int count = layout.num_flags();
  const std::string& whole = common_.label(unit, i);
  if (count == static_cast<int>(trained.size())) return whole;
  std::string& label = labels_[unit][i][trained];
  if (!label.empty()) return label;
  const uint64_t hash = Fnv1a(std::string(trained.begin(), trained.end()));
  const auto& parameter = *common_.units()[unit].flats[i];
  label = absl::StrCat(
      whole, " (trains ", count, " of ", trained.size(), " parameters, ",
      absl::Hex(hash, absl::kZeroPad16), ", first ",
      parameter.parameter(layout.parameters().front()).name, ")");
  return label;
}

absl::Status Reducer::Replicate(int unit) {
  const auto reduction = std::find_if(
      reductions_.begin(), reductions_.end(), [unit](const Reduction& other) {
        return other.unit == unit && !other.replicating;
      });
  FSDP_CHECK(reduction != reductions_.end());
  reduction->replicating = true;
  reduction->is_sound = false;
  const BesideScope beside(*this, /*has_work=*/true);
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    Flat& flat = flats_[unit][i];
    ReduceBuffer& buffer = reduction->buffers[i];
    std::unique_ptr<comm::Work>& work = reduction->works[i];
    if (work != nullptr) FSDP_RETURN_IF_ERROR(common_.Await(*work));
    ReduceBuffer sums = std::exchange(flat.sums, ReduceBuffer());
    if (sums.has_gradients() && buffer.has_gradients()) {
      flat.gradients.AddSegment(sums, buffer);
    }
    if (sums.has_gradients()) memory_.GiveBack(sums, /*reader=*/nullptr);
    FSDP_RETURN_IF_ERROR(ReplicateFlat(unit, i, *reduction));
  }
  reduction->is_sound = true;
  return absl::OkStatus();
}

absl::Status Reducer::ReplicateFlat(int unit, size_t i, Reduction& reduction) {
  const ReduceBuffer& buffer = reduction.buffers[i];
  if (!buffer.has_gradients()) return absl::OkStatus();
  const FlatGradients& gradients = flats_[unit][i].gradients;
  comm::Communicator& group = *common_.placement(unit).replicate;
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReplicate, unit, label,
                      buffer.layout->bytes(), gradients.options().reduce_dtype);
  const at::Tensor own = gradients.OwnSegment(buffer);
  FSDP_ASSIGN_OR_RETURN(
      reduction.works[i],
      hooks_.all_reduce
          ? hooks_.all_reduce({common_.label(unit, i), group, own})
          : group.AllReduce(own, comm::ReduceOp::kSum, label));
  return absl::OkStatus();
}

// Waits until this rank's segment has the sum; on a device, the current stream
// waits.
absl::Status Reducer::AwaitReduced(std::unique_ptr<comm::Work>& work) {
  if (work == nullptr) return absl::OkStatus();
  if (!HasStreams(common_.device())) {
    return work->WaitForResult(common_.Deadline());
  }
  FSDP_RETURN_IF_ERROR(work->BlockCurrentStream());
  work.reset();
  return absl::OkStatus();
}

absl::Status Reducer::KeepSums(int unit) {
  FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
  Reduction& reduction = reductions_.front();
  reduction.is_sound = false;
  const BesideScope beside(*this, /*has_work=*/true);
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    Flat& flat = flats_[unit][i];
    ReduceBuffer& buffer = reduction.buffers[i];
    if (!buffer.has_gradients()) continue;
    FSDP_RETURN_IF_ERROR(AwaitReduced(reduction.works[i]));
    FSDP_RETURN_IF_ERROR(memory_.AddToSums(flat.gradients, buffer, flat.sums));
    memory_.GiveBack(buffer, std::move(reduction.works[i]));
  }
  reductions_.pop_front();
  return absl::OkStatus();
}

absl::Status Reducer::ReplicateSums(int unit) {
  Reduction& reduction = reductions_.emplace_back();
  reduction.unit = unit;
  reduction.replicating = true;
  const BesideScope beside(*this, /*has_work=*/true);
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    reduction.buffers.push_back(
        std::exchange(flats_[unit][i].sums, ReduceBuffer()));
    reduction.works.emplace_back();
    reduction.direct.push_back(false);
    FSDP_RETURN_IF_ERROR(ReplicateFlat(unit, i, reduction));
  }
  reduction.is_sound = true;
  return absl::OkStatus();
}

absl::Status Reducer::WaitReduce(int unit) {
  FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
  Reduction& reduction = reductions_.front();
  reduction.is_sound = false;
  const BesideScope beside(*this, reduces_beside_[unit]);
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    Flat& flat = flats_[unit][i];
    std::unique_ptr<comm::Work>& work = reduction.works[i];
    ReduceBuffer& buffer = reduction.buffers[i];
    if (!buffer.has_gradients()) continue;
    const bool was_sent = work != nullptr;
    FSDP_RETURN_IF_ERROR(AwaitReduced(work));
    const at::Tensor filled = buffer.memory;
    if (reduction.direct[i]) {
      flat.gradients.FinishDirect(buffer.produced);
    } else if (was_sent || !flat.gradients.TakeOver(buffer)) {
      FSDP_RETURN_IF_ERROR(flat.gradients.AccumulateMean(buffer));
    } else if (!buffer.has_gradients()) {
      memory_.Discard(filled);
    }
    if (buffer.has_gradients()) memory_.GiveBack(buffer, std::move(work));
  }
  reductions_.pop_front();
  if (hooks_.step) awaits_step_.insert(unit);
  return absl::OkStatus();
}

// Hides the gradients of other units that wait for their step, since an
// optimizer over all shards would also step a unit that is used several times
// and has only a part of its gradient. Returns what the step returns or throws.
absl::Status Reducer::Step(int unit) {
  const BesideScope beside(*this, reduces_beside_[unit]);
  awaits_step_.erase(unit);
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden;  // slice, gradient
  for (int other : awaits_step_) {
    ForEachGradient(common_.units()[other], [&](const at::Tensor& slice) {
      hidden.emplace_back(slice, slice.grad());
      slice.mutable_grad().reset();
    });
  }
  const absl::Status status =
      TorchToStatus(absl::StrCat("the step of unit ", common_.name(unit)),
                    [&] { return hooks_.step(unit); });
  for (const auto& [slice, gradient] : hidden) slice.mutable_grad() = gradient;
  FSDP_RETURN_IF_ERROR(status);
  for (Flat& flat : flats_[unit]) {
    memory_.TakeBytes(flat.gradients.DropUnused());
  }
  return absl::OkStatus();
}

void Reducer::DropUnstepped() {
  for (int unit : awaits_step_) {
    ForEachGradient(common_.units()[unit], [](const at::Tensor& slice) {
      slice.mutable_grad().reset();
    });
  }
  awaits_step_.clear();
}

// Memory goes back to the stream that allocated it, so that stream must follow
// the one that has used the memory.
void Reducer::DropUnusedGradients() {
  bool follows = false;
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      if (!flat.gradients.values().defined()) continue;
      if (!std::exchange(follows, true)) stream_.FollowCurrentStream();
      flat.gradients.DropUnused();
    }
  }
}

void Reducer::BeginAlike() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) memory_.TakeBytes(flat.gradients.GiveUnused());
  }
  memory_.SortFree();
}

std::vector<at::Tensor> Reducer::StepMemory() const {
  std::vector<at::Tensor> memory = memory_.free_buffers();
  for (const std::vector<Flat>& flats : flats_) {
    for (const Flat& flat : flats) {
      memory.push_back(flat.gradients.values());
    }
  }
  return memory;
}

void Reducer::DropWholeGradients() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      memory_.DropKept(flat.whole_gradients);
      memory_.DropKept(flat.sums);
    }
  }
}

bool Reducer::HasWholeGradients(int unit) const {
  return std::any_of(
      flats_[unit].begin(), flats_[unit].end(),
      [](const Flat& flat) { return flat.whole_gradients.has_gradients(); });
}

bool Reducer::HasSums(int unit) const {
  return std::any_of(
      flats_[unit].begin(), flats_[unit].end(),
      [](const Flat& flat) { return flat.sums.has_gradients(); });
}

void Reducer::FinishReductions(absl::FunctionRef<bool(int unit)> all_reduces) {
  while (!reductions_.empty() && reductions_.front().is_sound) {
    const int unit = reductions_.front().unit;
    const bool replicates = common_.placement(unit).replicate != nullptr &&
                            !reductions_.front().replicating;
    const auto finish = [&]() -> absl::Status {
      if (replicates && !all_reduces(unit)) return KeepSums(unit);
      if (replicates) FSDP_RETURN_IF_ERROR(Replicate(unit));
      return WaitReduce(unit);
    };
    if (!TorchToStatus("finishing the reductions of a backward", finish).ok()) {
      break;
    }
  }
  EndOfBackward();
}

// Discards memory of collectives in flight: a peer may still write to it.
void Reducer::DropEverything(bool sent) {
  for (Reduction& reduction : reductions_) {
    for (std::unique_ptr<comm::Work>& work : reduction.works) {
      common_.Forget(work);
    }
    for (ReduceBuffer& buffer : reduction.buffers) {
      if (sent && buffer.has_gradients()) {
        memory_.Discard(buffer.memory);
      } else {
        memory_.DropKept(buffer);
      }
    }
  }
  reductions_.clear();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.gradients.ForgetDirect();
  }
}

}  // namespace fsdp
