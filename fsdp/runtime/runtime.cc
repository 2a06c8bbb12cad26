#include "fsdp/runtime/runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/fence.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {
namespace {

// That of all units.
c10::Device DeviceOf(absl::Span<const RuntimeUnit> units) {
  for (const RuntimeUnit& unit : units) {
    if (!unit.flats.empty()) return unit.flats.front()->shard().device();
  }
  return at::kCPU;
}

using Group = std::shared_ptr<comm::Communicator>;

const Group& SharedBy(const Placement& placement) { return placement.shard; }

// Whose collective reads what gradients are packed into first.
const Group& ReducedBy(const Placement& placement) {
  const bool is_replicated_only =
      placement.shard->world_size() == 1 && placement.replicate != nullptr;
  return is_replicated_only ? placement.replicate : placement.shard;
}

// Memory that a group allocates is of most use to its own collectives. Buffers
// go from unit to unit, so where units lie on several groups, `world` does it.
// Shards and their gradients, at the other end of these collectives, are memory
// like any other: NCCL's fastest kernels, which can be aborted from 2.29.7 on
// and are used from there on, ask for one end in a window.
BufferPool::Allocate AllocateBy(const Group& (*group_of)(const Placement&),
                                absl::Span<const RuntimeUnit> units,
                                const Group& world) {
  Group group;
  for (const RuntimeUnit& unit : units) {
    const Group& of_unit = group_of(unit.placement);
    if (unit.flats.empty() || of_unit->world_size() == 1) continue;
    if (group != nullptr && group != of_unit) {
      group = world;
      break;
    }
    group = of_unit;
  }
  if (group == nullptr) group = world;
  return [group](int64_t bytes) { return group->AllocateSymmetric(bytes); };
}

}  // namespace

Runtime::Runtime(std::shared_ptr<comm::Communicator> communicator,
                 std::vector<RuntimeUnit> units, absl::Duration timeout,
                 std::vector<std::unique_ptr<comm::Fence>> fences)
    : communicator_(std::move(communicator)),
      units_(std::move(units)),
      timeout_(timeout),
      fences_(std::move(fences)),
      device_(DeviceOf(units_)),
      gather_stream_(device_, SideStream::Priority::kHigh),
      reduce_stream_(device_, SideStream::Priority::kHigh),
      parameter_memory_(AllocateBy(&SharedBy, units_, communicator_)),
      gradient_memory_(AllocateBy(&ReducedBy, units_, communicator_)) {
  for (const RuntimeUnit& unit : units_) {
    FSDP_CHECK(unit.flats.size() == unit.gradients.size());
    FSDP_CHECK(unit.shared.empty() || unit.shared.size() == unit.flats.size());
    std::vector<Flat>& flats = flats_.emplace_back();
    for (size_t i = 0; i < unit.flats.size(); ++i) {
      flat_param::FlatParameter* parameter = unit.flats[i].get();
      std::string label = unit.name;
      if (unit.flats.size() > 1) {
        absl::StrAppend(&label, "/", c10::toString(parameter->dtype()));
        if (parameter->compute_dtype() != parameter->dtype()) {
          absl::StrAppend(&label, " in ",
                          c10::toString(parameter->compute_dtype()));
        }
      }
      const bool is_known =
          std::any_of(flats.begin(), flats.end(),
                      [&](const Flat& flat) { return flat.label == label; });
      if (is_known) {
        absl::StrAppend(&label, " from ", parameter->parameter(0).name, " on");
      }
      flats.push_back({std::move(label),
                       parameter,
                       GradientBuffer(parameter, unit.gradients[i]),
                       unit.shared.empty() ? SharedFlat() : unit.shared[i],
                       false,
                       at::Tensor(),
                       false,
                       nullptr,
                       DeviceEvent(),
                       at::Tensor(),
                       ReduceBuffer(),
                       ReduceBuffer(),
                       {}});
    }
  }
  ChooseStreams();
}

// Memory goes back to the stream that it was allocated on, behind what the
// others have been given.
Runtime::~Runtime() {
  // A device that has failed, of which other calls tell, has nothing to order.
  TorchToStatus("ordering the end of a model", [this] {
    for (SideStream* stream : {&gather_stream_, &reduce_stream_}) {
      stream->BlockCurrentStream();
      stream->FollowCurrentStream();
    }
  }).IgnoreError();
}

int64_t Runtime::reduce_buffer_bytes(int unit) const {
  int64_t bytes = 0;
  for (const Flat& flat : flats_[unit]) bytes += flat.gradient_buffer.bytes();
  return bytes;
}

void Runtime::SetGradientScaling(GradientScaling scaling) {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.gradient_buffer.SetScaling(scaling);
  }
  ChooseStreams();
}

void Runtime::SetPrecision(int unit, flat_param::Precision precision) {
  for (Flat& flat : flats_[unit]) flat.parameter->SetPrecision(precision);
}

void Runtime::Abort(const absl::Status& reason) {
  communicator_->Abort(reason);
  for (const RuntimeUnit& unit : units_) {
    unit.placement.shard->Abort(reason);
    if (unit.placement.replicate != nullptr) {
      unit.placement.replicate->Abort(reason);
    }
    if (unit.placement.part != nullptr) unit.placement.part->Abort(reason);
  }
}

absl::Status Runtime::Execute(absl::Span<const Action> actions,
                              absl::Span<const at::Tensor> gradients) {
  for (const Action& action : actions) {
    // LibTorch throws when memory runs out, and so may a user's hook.
    absl::Status status;
    const absl::Status thrown = TorchToStatus(
        [&] {
          return absl::StrCat(Name(action.kind), " of unit ",
                              name(action.unit));
        },
        [&] { status = ExecuteAndLog(action, gradients); });
    FSDP_RETURN_IF_ERROR(thrown);
    FSDP_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status Runtime::ExecuteAndLog(const Action& action,
                                    absl::Span<const at::Tensor> gradients) {
  if (step_log_ == nullptr) return ExecuteOne(action, gradients);
  const int64_t flag_reads = FlagReads(action.unit);
  FSDP_RETURN_IF_ERROR(ExecuteOne(action, gradients));
  step_log_->push_back(RecordOf(action));
  step_log_->back().read_flags = FlagReads(action.unit) > flag_reads;
  return absl::OkStatus();
}

int64_t Runtime::FlagReads(int unit) const {
  int64_t reads = 0;
  for (const Flat& flat : flats_[unit]) {
    reads += flat.gradient_buffer.flag_reads();
  }
  return reads;
}

StepRecord Runtime::RecordOf(const Action& action) const {
  const auto address = [](const at::Tensor& tensor) -> const void* {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  };
  const int unit = action.unit;
  StepRecord record{action};
  for (const Flat& flat : flats_[unit]) {
    record.gathered.push_back(address(flat.memory));
  }
  for (const Reduction& reduction : reductions_) {
    if (reduction.unit != unit) continue;
    for (const ReduceBuffer& buffer : reduction.buffers) {
      record.reduced.push_back(address(buffer.memory));
    }
  }
  return record;
}

absl::Status Runtime::ExecuteOne(const Action& action,
                                 absl::Span<const at::Tensor> gradients) {
  const int unit = action.unit;
  RECORD_USER_SCOPE(
      absl::StrCat("fsdp::", Name(action.kind), "(", name(unit), ")"));
  switch (action.kind) {
    case ActionKind::kLoad:
      for (Flat& flat : flats_[unit]) PrefetchTensor(flat.parameter->shard());
      return absl::OkStatus();
    case ActionKind::kGather:
      return Gather(unit);
    case ActionKind::kGatherCopy:
      return GatherCopy(unit);
    case ActionKind::kWaitGather:
      return WaitGather(unit);
    case ActionKind::kFree:
      Free(unit);
      return absl::OkStatus();
    case ActionKind::kShrink:
      return Shrink(unit);
    case ActionKind::kDropPart:
      for (Flat& flat : flats_[unit]) flat.part.reset();
      return absl::OkStatus();
    case ActionKind::kAccumulate:
      return Accumulate(unit, gradients);
    case ActionKind::kFillReduceBuffer:
      return FillReduceBuffer(unit, gradients);
    case ActionKind::kReduce:
      return Reduce(unit);
    case ActionKind::kReplicate:
      return Replicate(unit);
    case ActionKind::kKeepSums:
      return KeepSums(unit);
    case ActionKind::kReplicateSums:
      return ReplicateSums(unit);
    case ActionKind::kWaitReduce:
      return WaitReduce(unit);
    case ActionKind::kStep:
      return Step(unit);
    case ActionKind::kOpenShards:
      return OpenShards();
    case ActionKind::kCloseShards:
      return PassFences("waiting until no rank reads other ranks' shards");
  }
  return absl::InternalError("unknown action");
}

// The host waits where a device cannot.
absl::Status Runtime::Await(comm::Work& work) const {
  return HasStreams(device_) ? work.BlockCurrentStream()
                             : work.Wait(Deadline());
}

bool Runtime::HoldsCopy(int unit) const {
  return std::any_of(flats_[unit].begin(), flats_[unit].end(),
                     [](const Flat& flat) { return flat.memory_is_pooled; });
}

absl::Status Runtime::Gather(int unit) {
  const bool has_work =
      std::any_of(flats_[unit].begin(), flats_[unit].end(),
                  [&](const Flat& flat) { return !ShowsShard(unit, flat); });
  std::optional<SideStream::Scope> beside;
  if (has_work) {
    gather_stream_.FollowCurrentStream();
    beside.emplace(gather_stream_);
  }
  for (Flat& flat : flats_[unit]) {
    FSDP_CHECK(!flat.memory.defined());
    FSDP_RETURN_IF_ERROR(GatherFlat(unit, flat));
  }
  return absl::OkStatus();
}

// The shards are read before this returns, by the stream that writes them, and
// the peers read the copy.
absl::Status Runtime::GatherCopy(int unit) {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  for (Flat& flat : flats_[unit]) {
    FSDP_CHECK(!flat.memory.defined());
    at::Tensor& part = own.emplace_back();
    if (!ShowsShard(unit, flat)) {
      FSDP_ASSIGN_OR_RETURN(part, CopyOwnShard(flat));
    }
  }
  gather_stream_.FollowCurrentStream();
  const SideStream::Scope beside(gather_stream_);
  for (size_t i = 0; i < own.size(); ++i) {
    Flat& flat = flats_[unit][i];
    FSDP_RETURN_IF_ERROR(own[i].defined() ? StartAllGather(unit, flat, own[i])
                                          : GatherFlat(unit, flat));
  }
  return absl::OkStatus();
}

// Whether there is nothing to gather, cast or read.
bool Runtime::ShowsShard(int unit, const Flat& flat) const {
  const flat_param::FlatParameter& parameter = *flat.parameter;
  return units_[unit].placement.shard->world_size() == 1 &&
         parameter.unsharded_dtype() == parameter.dtype() &&
         !RestsElsewhere(parameter.shard());
}

absl::Status Runtime::GatherFlat(int unit, Flat& flat) {
  c10::NoGradGuard no_grad;
  const flat_param::FlatParameter& parameter = *flat.parameter;
  flat.memory_is_pooled = false;
  if (ShowsShard(unit, flat)) {
    const at::Tensor& shard = parameter.shard();
    flat.memory =
        RangeOf(shard, at::kByte, 0, static_cast<int64_t>(shard.nbytes()));
    return absl::OkStatus();
  }
  const bool fits = parameter.unsharded_dtype() == parameter.compute_dtype();
  if (flat.shared.memory.defined() && fits) return GatherShared(unit, flat);
  const bool casts = parameter.unsharded_dtype() != parameter.dtype();
  if (!flat.part.defined() && (casts || RestsElsewhere(parameter.shard()))) {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor own, CopyOwnShard(flat));
    return StartAllGather(unit, flat, own);
  }
  FSDP_ASSIGN_OR_RETURN(flat.memory,
                        parameter_memory_.Acquire(parameter.unsharded_bytes()));
  flat.memory_is_pooled = true;
  if (!flat.part.defined()) {
    return StartAllGather(unit, flat, parameter.shard());
  }
  FSDP_ASSIGN_OR_RETURN(
      flat.gather, units_[unit].placement.part->AllGather(
                       parameter.AsFlat(flat.memory), flat.part, flat.label));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> Runtime::CopyOwnShard(Flat& flat) {
  const flat_param::FlatParameter& parameter = *flat.parameter;
  FSDP_ASSIGN_OR_RETURN(flat.memory,
                        parameter_memory_.Acquire(parameter.unsharded_bytes()));
  flat.memory_is_pooled = true;
  const flat_param::Slice range =
      parameter.layout().ShardRange(parameter.rank());
  const at::Tensor own =
      RangeOf(parameter.AsFlat(flat.memory), range.begin, range.numel());
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(parameter.shard(), Use::kRead));
  own.copy_(parameter.shard());
  return own;
}

// Into flat.memory; `own` may lie there.
absl::Status Runtime::StartAllGather(int unit, Flat& flat,
                                     const at::Tensor& own) {
  const flat_param::FlatParameter& parameter = *flat.parameter;
  const Placement& placement = units_[unit].placement;
  if (placement.shard->world_size() == 1) {
    flat.filled.Record(device_);
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(
      flat.gather, placement.traffic().AllGather(parameter.AsFlat(flat.memory),
                                                 own, flat.label));
  order_.Add(ActionKind::kGather, unit, flat.label, parameter.unsharded_bytes(),
             parameter.unsharded_dtype());
  return absl::OkStatus();
}

// Where the shards rest nothing is left to do. Else each rank casts its own
// part, once as long as the shards stay as they are.
absl::Status Runtime::GatherShared(int unit, Flat& flat) {
  const flat_param::FlatParameter& parameter = *flat.parameter;
  flat.memory = flat.shared.memory;
  if (flat.shared.holds_shards || flat.shared_is_current) {
    return absl::OkStatus();
  }
  const at::Tensor whole = parameter.AsFlat(flat.memory);
  const flat_param::Slice range =
      parameter.layout().ShardRange(parameter.rank());
  const at::Tensor own = RangeOf(whole, range.begin, range.numel());
  own.copy_(parameter.shard());
  flat.shared_is_current = true;
  comm::Communicator& group = *units_[unit].placement.shard;
  if (group.world_size() == 1) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(flat.gather, group.AllGather(whole, own, flat.label));
  order_.Add(ActionKind::kGather, unit, flat.label, parameter.unsharded_bytes(),
             parameter.unsharded_dtype());
  return absl::OkStatus();
}

absl::Status Runtime::OpenShards() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.shared_is_current = false;
  }
  return PassFences("waiting until every rank has written its shards");
}

absl::Status Runtime::PassFences(absl::string_view what) {
  for (const auto& fence : fences_) fence->Arrive();
  for (const auto& fence : fences_) {
    const absl::Status status = fence->Wait(Deadline());
    if (!status.ok()) return Annotate(status, what);
  }
  return absl::OkStatus();
}

absl::Status Runtime::WaitGather(int unit) {
  for (Flat& flat : flats_[unit]) {
    if (flat.gather != nullptr) {
      FSDP_RETURN_IF_ERROR(Await(*flat.gather));
      flat.gather.reset();
    } else {
      flat.filled.BlockCurrentStream();
    }
    flat.parameter->Fill(flat.memory);
  }
  return absl::OkStatus();
}

void Runtime::Free(int unit) {
  for (Flat& flat : flats_[unit]) {
    flat.parameter->Empty();
    ReleaseMemory(flat);
  }
}

void Runtime::ReleaseMemory(Flat& flat) {
  if (flat.memory_is_pooled) parameter_memory_.Release(flat.memory);
  flat.memory.reset();
}

absl::Status Runtime::Shrink(int unit) {
  const comm::Communicator& group = *units_[unit].placement.part;
  for (Flat& flat : flats_[unit]) {
    const at::Tensor whole = flat.parameter->AsFlat(flat.memory);
    const int64_t numel = whole.numel() / group.world_size();
    flat.part = RangeOf(whole, group.rank() * numel, numel).clone();
  }
  Free(unit);
  return absl::OkStatus();
}

class Runtime::BesideScope {
 public:
  BesideScope(Runtime& runtime, bool has_work) {
    if (!has_work) return;
    runtime.reduce_stream_.FollowCurrentStream();
    scope_.emplace(runtime.reduce_stream_);
    runtime.has_reduced_beside_ = true;
  }

 private:
  std::optional<SideStream::Scope> scope_;
};

void Runtime::EndOfBackward() {
  if (std::exchange(has_reduced_beside_, false)) {
    reduce_stream_.BlockCurrentStream();
  }
}

// Gradients that are taken as they are, by all of a unit, are memory of the
// stream that computes, and so is what becomes of them. What a unit that is
// alone does not train now reduces there too, should it be trained later. Steps
// run on one stream, whatever the unit: optimizers have memory of their own.
void Runtime::ChooseStreams() {
  reduces_beside_.assign(num_units(), false);
  bool any = false;
  for (int unit = 0; unit < num_units(); ++unit) {
    const bool stays =
        IsAlone(unit) &&
        std::all_of(flats_[unit].begin(), flats_[unit].end(),
                    [](const Flat& flat) {
                      return flat.gradient_buffer.shard_bytes() == 0 ||
                             flat.gradient_buffer.TakesGradients();
                    });
    if (!stays) reduces_beside_[unit] = any = true;
  }
  if (any && hooks_.step) reduces_beside_.assign(num_units(), true);
}

void Runtime::SetHooks(RuntimeHooks hooks) {
  hooks_ = std::move(hooks);
  if (hooks_.reduce_scatter || hooks_.all_reduce) ScaleAfterSums();
  ChooseStreams();
}

void Runtime::ScaleAfterSums() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      const GradientScaling scaling = flat.gradient_buffer.scaling();
      if (!scaling.before_for_speed) continue;
      flat.gradient_buffer.SetScaling({1, scaling.before * scaling.after});
    }
  }
}

// Whether the unit's gradients are those of this rank.
bool Runtime::IsAlone(int unit) const {
  const Placement& placement = units_[unit].placement;
  return placement.shard->world_size() == 1 && placement.replicate == nullptr;
}

bool Runtime::TakesGradients(int unit, int i) const {
  return IsAlone(unit) && !reduces_beside_[unit] &&
         flats_[unit][i].gradient_buffer.TakesGradients();
}

// What becomes the gradient of a unit that is alone goes round: from one step's
// gradient to the next one's buffer.
absl::StatusOr<at::Tensor> Runtime::AcquireBuffer(
    int unit, Flat& flat, const GradientLayout& layout) {
  if (IsAlone(unit)) {
    const at::Tensor unused = flat.gradient_buffer.GiveUnused();
    if (unused.defined()) gradient_memory_.Adopt(unused, DeviceEvent());
  }
  return gradient_memory_.Acquire(layout.bytes());
}

// Makes `buffer` one of `layout`, with the gradients that it has.
absl::Status Runtime::LayOut(Flat& flat, const GradientBuffer::Layout& layout,
                             ReduceBuffer& buffer) {
  const bool is_same = buffer.layout == layout ||
                       (buffer.layout != nullptr && layout != nullptr &&
                        buffer.layout->trained() == layout->trained());
  if (is_same) return absl::OkStatus();
  ReduceBuffer next = {layout, {}};
  if (buffer.has_gradients() && layout != nullptr) {
    FSDP_ASSIGN_OR_RETURN(next.memory,
                          gradient_memory_.Acquire(layout->bytes()));
    flat.gradient_buffer.Convert(buffer, next);
  }
  if (buffer.has_gradients()) gradient_memory_.Release(buffer.memory);
  buffer = std::move(next);
  return absl::OkStatus();
}

// Adds `gradients`, or none, to what `buffer` has, which gets that layout.
absl::Status Runtime::Collect(int unit, Flat& flat,
                              absl::Span<const at::Tensor> gradients,
                              const GradientBuffer::Layout& layout,
                              ReduceBuffer& buffer) {
  FSDP_RETURN_IF_ERROR(LayOut(flat, layout, buffer));
  if (layout == nullptr || gradients.empty()) return absl::OkStatus();
  if (buffer.has_gradients()) {
    flat.gradient_buffer.Add(buffer, gradients);
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(buffer.memory, AcquireBuffer(unit, flat, *layout));
  flat.gradient_buffer.Fill(buffer, gradients);
  return absl::OkStatus();
}

// What was trained in an earlier backward may be again when it is reduced.
absl::Status Runtime::Accumulate(int unit,
                                 absl::Span<const at::Tensor> gradients) {
  size_t first = 0;
  for (Flat& flat : flats_[unit]) {
    const size_t count = flat.parameter->num_parameters();
    FSDP_RETURN_IF_ERROR(
        Collect(unit, flat, gradients.subspan(first, count),
                flat.gradient_buffer.CurrentLayout(flat.whole_gradients.layout),
                flat.whole_gradients));
    first += count;
  }
  return absl::OkStatus();
}

absl::Status Runtime::FillReduceBuffer(int unit,
                                       absl::Span<const at::Tensor> gradients) {
  Reduction& reduction = reductions_.emplace_back();
  reduction.unit = unit;
  size_t first = 0;
  for (Flat& flat : flats_[unit]) {
    ReduceBuffer& buffer = reduction.buffers.emplace_back();
    buffer = std::exchange(flat.whole_gradients, ReduceBuffer());
    flat.gradient_buffer.Prefetch();
    absl::Span<const at::Tensor> own = gradients;
    if (!gradients.empty()) {
      const size_t count = flat.parameter->num_parameters();
      own = gradients.subspan(first, count);
      first += count;
    }
    const bool may_take = IsAlone(unit) && !reduces_beside_[unit] &&
                          !own.empty() && !buffer.has_gradients();
    if (may_take && flat.gradient_buffer.Take(own)) {
      if (hooks_.step) awaiting_step_.insert(unit);
      continue;
    }
    FSDP_RETURN_IF_ERROR(
        Collect(unit, flat, own, flat.gradient_buffer.CurrentLayout(), buffer));
  }
  return absl::OkStatus();
}

absl::Status Runtime::Reduce(int unit) {
  const BesideScope beside(*this,
                           units_[unit].placement.shard->world_size() > 1);
  Reduction& reduction = reductions_.back();
  FSDP_CHECK(reduction.unit == unit && reduction.works.empty());
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    FSDP_RETURN_IF_ERROR(ReduceFlat(unit, i, reduction));
  }
  reduction.is_sound = true;
  return absl::OkStatus();
}

// Not where something else happens to the sum on its way, or will have happened
// to the gradient when an earlier reduction of the unit is done.
bool Runtime::ReducesDirectly(int unit, size_t i) const {
  const Placement& placement = units_[unit].placement;
  if (hooks_.reduce_scatter || placement.replicate != nullptr ||
      placement.shard->world_size() == 1) {
    return false;
  }
  return std::all_of(reductions_.begin(), std::prev(reductions_.end()),
                     [&](const Reduction& earlier) {
                       return earlier.unit != unit || earlier.direct[i];
                     });
}

// Ranks that train others of the unit's parameters have another label, which
// groups compare, where segments may be as long.
const std::string& Runtime::ReduceLabel(Flat& flat,
                                        const GradientLayout& layout) {
  const std::vector<bool>& trained = layout.trained();
  const int count = layout.num_flags();
  if (count == static_cast<int>(trained.size())) return flat.label;
  std::string& label = flat.reduce_labels[trained];
  if (!label.empty()) return label;
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const bool is_trained : trained) {
    hash = (hash ^ (is_trained ? 1 : 0)) * 0x100000001b3;
  }
  label = absl::StrCat(
      flat.label, " (trains ", count, " of ", trained.size(), " parameters, ",
      absl::Hex(hash, absl::kZeroPad16), ", first ",
      flat.parameter->parameter(layout.parameters().front()).name, ")");
  return label;
}

absl::Status Runtime::ReduceFlat(int unit, size_t i, Reduction& reduction) {
  Flat& flat = flats_[unit][i];
  const ReduceBuffer& buffer = reduction.buffers[i];
  std::unique_ptr<comm::Work>& work = reduction.works.emplace_back();
  reduction.direct.push_back(false);
  const Placement& placement = units_[unit].placement;
  if (!buffer.has_gradients() || placement.shard->world_size() == 1) {
    return absl::OkStatus();
  }
  const std::string& label = ReduceLabel(flat, *buffer.layout);
  order_.Add(ActionKind::kReduce, unit, label, buffer.layout->bytes(),
             flat.gradient_buffer.options().reduce_dtype);
  const at::Tensor own = flat.gradient_buffer.OwnSegment(buffer);
  const at::Tensor whole = flat.gradient_buffer.Whole(buffer);
  std::optional<GradientBuffer::DirectTarget> target;
  if (ReducesDirectly(unit, i)) {
    FSDP_ASSIGN_OR_RETURN(target,
                          flat.gradient_buffer.StartDirect(buffer.layout));
  }
  if (target) {
    reduction.direct[i] = true;
    FSDP_ASSIGN_OR_RETURN(work, placement.traffic().ReduceScatterScaled(
                                    target->out, whole, target->sum, label));
  } else if (hooks_.reduce_scatter) {
    FSDP_ASSIGN_OR_RETURN(
        work,
        hooks_.reduce_scatter({flat.label, *placement.shard, whole, own}));
  } else {
    FSDP_ASSIGN_OR_RETURN(work, placement.traffic().ReduceScatter(
                                    own, whole, comm::ReduceOp::kSum, label));
  }
  return absl::OkStatus();
}

absl::Status Runtime::Replicate(int unit) {
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
    if (work != nullptr) FSDP_RETURN_IF_ERROR(Await(*work));
    ReduceBuffer sums = std::exchange(flat.sums, ReduceBuffer());
    if (sums.has_gradients() && buffer.has_gradients()) {
      flat.gradient_buffer.AddSegment(sums, buffer);
    }
    if (sums.has_gradients()) ReleaseBuffer(sums, /*reader=*/nullptr);
    FSDP_RETURN_IF_ERROR(StartAllReduce(unit, flat, buffer, work));
  }
  reduction->is_sound = true;
  return absl::OkStatus();
}

// In place in this rank's segment.
absl::Status Runtime::StartAllReduce(int unit, Flat& flat,
                                     const ReduceBuffer& buffer,
                                     std::unique_ptr<comm::Work>& work) {
  if (!buffer.has_gradients()) return absl::OkStatus();
  comm::Communicator& group = *units_[unit].placement.replicate;
  const std::string& label = ReduceLabel(flat, *buffer.layout);
  order_.Add(ActionKind::kReplicate, unit, label, buffer.layout->bytes(),
             flat.gradient_buffer.options().reduce_dtype);
  const at::Tensor own = flat.gradient_buffer.OwnSegment(buffer);
  if (hooks_.all_reduce) {
    FSDP_ASSIGN_OR_RETURN(work, hooks_.all_reduce({flat.label, group, own}));
  } else {
    FSDP_ASSIGN_OR_RETURN(work,
                          group.AllReduce(own, comm::ReduceOp::kSum, label));
  }
  return absl::OkStatus();
}

// Until this rank's segment has the sum.
absl::Status Runtime::AwaitReduced(std::unique_ptr<comm::Work>& work) {
  if (work == nullptr) return absl::OkStatus();
  if (!HasStreams(device_)) return work->WaitForResult(Deadline());
  FSDP_RETURN_IF_ERROR(work->BlockCurrentStream());
  work.reset();
  return absl::OkStatus();
}

void Runtime::ReleaseBuffer(ReduceBuffer& buffer,
                            std::unique_ptr<comm::Work> reader) {
  DeviceEvent read;
  read.Record(device_);
  gradient_memory_.Release(buffer.memory, std::move(reader), std::move(read));
  buffer.memory.reset();
}

absl::Status Runtime::KeepSums(int unit) {
  FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
  Reduction& reduction = reductions_.front();
  reduction.is_sound = false;
  const BesideScope beside(*this, /*has_work=*/true);
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    Flat& flat = flats_[unit][i];
    ReduceBuffer& buffer = reduction.buffers[i];
    if (!buffer.has_gradients()) continue;
    FSDP_RETURN_IF_ERROR(AwaitReduced(reduction.works[i]));
    FSDP_RETURN_IF_ERROR(AddToSums(flat, buffer));
    ReleaseBuffer(buffer, std::move(reduction.works[i]));
  }
  reductions_.pop_front();
  return absl::OkStatus();
}

absl::Status Runtime::AddToSums(Flat& flat, const ReduceBuffer& buffer) {
  const GradientBuffer& gradients = flat.gradient_buffer;
  const bool has_sums = flat.sums.has_gradients();
  if (!has_sums || flat.sums.layout->trained() != buffer.layout->trained()) {
    ReduceBuffer next;
    next.layout =
        has_sums ? gradients.CurrentLayout(flat.sums.layout) : buffer.layout;
    next.is_segment = true;
    FSDP_ASSIGN_OR_RETURN(
        next.memory, gradient_memory_.Acquire(next.layout->segment_bytes()));
    gradients.Convert(has_sums ? flat.sums : buffer, next);
    if (has_sums) ReleaseBuffer(flat.sums, /*reader=*/nullptr);
    flat.sums = std::move(next);
    if (!has_sums) return absl::OkStatus();
  }
  gradients.AddSegment(buffer, flat.sums);
  return absl::OkStatus();
}

absl::Status Runtime::ReplicateSums(int unit) {
  Reduction& reduction = reductions_.emplace_back();
  reduction.unit = unit;
  reduction.replicating = true;
  const BesideScope beside(*this, /*has_work=*/true);
  for (Flat& flat : flats_[unit]) {
    ReduceBuffer& buffer = reduction.buffers.emplace_back();
    buffer = std::exchange(flat.sums, ReduceBuffer());
    reduction.direct.push_back(false);
    FSDP_RETURN_IF_ERROR(
        StartAllReduce(unit, flat, buffer, reduction.works.emplace_back()));
  }
  reduction.is_sound = true;
  return absl::OkStatus();
}

absl::Status Runtime::WaitReduce(int unit) {
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
    if (reduction.direct[i]) {
      flat.gradient_buffer.FinishDirect(buffer.produced);
    } else {
      FSDP_RETURN_IF_ERROR(TakeMean(flat, was_sent, buffer));
    }
    if (buffer.has_gradients()) ReleaseBuffer(buffer, std::move(work));
  }
  reductions_.pop_front();
  if (hooks_.step) awaiting_step_.insert(unit);
  return absl::OkStatus();
}

absl::Status Runtime::TakeMean(Flat& flat, bool was_sent,
                               ReduceBuffer& buffer) {
  const at::Tensor filled = buffer.memory;
  if (was_sent || !flat.gradient_buffer.TakeOver(buffer)) {
    return flat.gradient_buffer.AccumulateMean(buffer);
  }
  if (!buffer.has_gradients()) gradient_memory_.Discard(filled);
  return absl::OkStatus();
}

// An optimizer over all shards would also step a unit used several times, of
// whose gradient only a part has arrived yet.
Runtime::HiddenGradients Runtime::HideIncompleteGradients() {
  HiddenGradients hidden;
  for (int unit : awaiting_step_) {
    for (const auto& parameter : units_[unit].flats) {
      for (int i = 0; i < parameter->num_parameters(); ++i) {
        const at::Tensor& slice = parameter->ShardSlice(i);
        if (!slice.grad().defined()) continue;
        hidden.emplace_back(slice, slice.grad());
        slice.mutable_grad().reset();
      }
    }
  }
  return hidden;
}

absl::Status Runtime::Step(int unit) {
  awaiting_step_.erase(unit);
  const BesideScope beside(*this, reduces_beside_[unit]);
  const HiddenGradients hidden = HideIncompleteGradients();
  absl::Status status;
  status.Update(TorchToStatus(absl::StrCat("the step of unit ", name(unit)),
                              [&] { status = hooks_.step(unit); }));
  for (const auto& [slice, gradient] : hidden) slice.mutable_grad() = gradient;
  FSDP_RETURN_IF_ERROR(status);
  for (Flat& flat : flats_[unit]) {
    AdoptGradient(flat.gradient_buffer.DropUnusedGradient());
  }
  return absl::OkStatus();
}

// The current stream is the last that has used it.
void Runtime::AdoptGradient(const at::Tensor& memory) {
  if (!memory.defined()) return;
  DeviceEvent used;
  used.Record(device_);
  gradient_memory_.Adopt(memory, std::move(used));
}

void Runtime::BeginAlike() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) AdoptGradient(flat.gradient_buffer.GiveUnused());
  }
  parameter_memory_.SortFree();
  gradient_memory_.SortFree();
}

void Runtime::ForgetEarlierSteps() {
  parameter_memory_.ForgetUses();
  gradient_memory_.ForgetUses();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.filled = DeviceEvent();
  }
}

void Runtime::ForkStreams() {
  gather_stream_.FollowCurrentStream();
  reduce_stream_.FollowCurrentStream();
}

void Runtime::JoinStreams() {
  gather_stream_.BlockCurrentStream();
  reduce_stream_.BlockCurrentStream();
}

std::vector<at::Tensor> Runtime::StepMemory() const {
  std::vector<at::Tensor> memory = parameter_memory_.free_buffers();
  for (at::Tensor& buffer : gradient_memory_.free_buffers()) {
    memory.push_back(std::move(buffer));
  }
  for (const std::vector<Flat>& flats : flats_) {
    for (const Flat& flat : flats) {
      memory.push_back(flat.gradient_buffer.shard_gradient());
    }
  }
  return memory;
}

void Runtime::DropWholeGradients() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      for (ReduceBuffer* buffer : {&flat.whole_gradients, &flat.sums}) {
        if (buffer->has_gradients()) gradient_memory_.Release(buffer->memory);
        *buffer = ReduceBuffer();
      }
    }
  }
}

bool Runtime::HasWholeGradients(int unit) const {
  return std::any_of(
      flats_[unit].begin(), flats_[unit].end(),
      [](const Flat& flat) { return flat.whole_gradients.has_gradients(); });
}

bool Runtime::HasSums(int unit) const {
  return std::any_of(
      flats_[unit].begin(), flats_[unit].end(),
      [](const Flat& flat) { return flat.sums.has_gradients(); });
}

void Runtime::FinishReductions(absl::FunctionRef<bool(int unit)> all_reduces) {
  while (!reductions_.empty() && reductions_.front().is_sound) {
    const int unit = reductions_.front().unit;
    const bool replicates = units_[unit].placement.replicate != nullptr &&
                            !reductions_.front().replicating;
    absl::Status status;
    status.Update(TorchToStatus("finishing the reductions of a backward", [&] {
      if (replicates && !all_reduces(unit)) {
        status = KeepSums(unit);
        return;
      }
      if (replicates) status = Replicate(unit);
      if (status.ok()) status = WaitReduce(unit);
    }));
    if (!status.ok()) break;
  }
  EndOfBackward();
}

// The next backward would add to them: nothing else makes them go.
void Runtime::DropUnstepped() {
  for (int unit : awaiting_step_) {
    for (const auto& parameter : units_[unit].flats) {
      for (int i = 0; i < parameter->num_parameters(); ++i) {
        parameter->ShardSlice(i).mutable_grad().reset();
      }
    }
  }
  awaiting_step_.clear();
}

// The host does not wait; what a device is given from now on does.
void Runtime::Forget(std::unique_ptr<comm::Work>& work) {
  if (work != nullptr && HasStreams(device_)) {
    TorchToStatus("forgetting a collective", [&] {
      work->BlockCurrentStream().IgnoreError();
    }).IgnoreError();
  }
  work.reset();
}

// Memory of collectives in flight is discarded, not reused: a peer may still
// write it.
void Runtime::DropEverything() {
  DropUnstepped();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      flat.parameter->Empty();
      flat.shared_is_current = false;
      flat.part.reset();
      if (!flat.memory.defined()) continue;
      if (flat.gather != nullptr) {
        Forget(flat.gather);
        if (flat.memory_is_pooled) parameter_memory_.Discard(flat.memory);
        flat.memory.reset();
      } else {
        ReleaseMemory(flat);
      }
    }
  }
  for (Reduction& reduction : reductions_) {
    for (std::unique_ptr<comm::Work>& work : reduction.works) Forget(work);
    for (const ReduceBuffer& buffer : reduction.buffers) {
      if (buffer.has_gradients()) gradient_memory_.Discard(buffer.memory);
    }
  }
  reductions_.clear();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.gradient_buffer.ForgetDirect();
  }
  order_.Clear();
}

}  // namespace fsdp
