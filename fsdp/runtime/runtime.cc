#include "fsdp/runtime/runtime.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {

Runtime::Runtime(std::shared_ptr<comm::Communicator> communicator,
                 std::vector<RuntimeUnit> units, absl::Duration timeout,
                 std::vector<std::unique_ptr<comm::Fence>> fences)
    : RuntimeCommon(std::move(communicator), std::move(units), timeout),
      fences_(std::move(fences)),
      stream_(device(), SideStream::Priority::kHigh),
      memory_(AllocateBy([](const Placement& placement) -> const Group& {
        return placement.shard;
      })),
      reducer_(*this) {
  for (int unit = 0; unit < num_units(); ++unit) {
    const absl::Span<const RuntimeFlat> source = flats(unit);
    std::vector<Flat>& own = flats_.emplace_back();
    for (size_t i = 0; i < source.size(); ++i) {
      own.push_back({label(unit, i), *source[i], source[i].shared});
    }
  }
}

// Memory goes back to the stream that allocated it, so that stream must follow
// what the other streams have been given.
Runtime::~Runtime() {
  // A failed device, which other calls report, has nothing to order.
  TorchToStatus("ordering the end of a model", [this] {
    JoinStreams();
    ForkStreams();
  }).IgnoreError();
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
    stream_.FollowCurrentStream();
    beside.emplace(stream_);
  }
  for (Flat& flat : flats_[unit]) {
    FSDP_CHECK(!flat.memory.defined());
    FSDP_RETURN_IF_ERROR(GatherFlat(unit, flat));
  }
  return absl::OkStatus();
}

// The stream that writes the shards reads them before this returns; peers read
// the copy.
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
  stream_.FollowCurrentStream();
  const SideStream::Scope beside(stream_);
  for (size_t i = 0; i < own.size(); ++i) {
    Flat& flat = flats_[unit][i];
    FSDP_RETURN_IF_ERROR(own[i].defined() ? StartAllGather(unit, flat, own[i])
                                          : GatherFlat(unit, flat));
  }
  return absl::OkStatus();
}

// Returns whether the unsharded parameter is the shard itself: there is nothing
// to gather, to cast or to load.
bool Runtime::ShowsShard(int unit, const Flat& flat) const {
  const flat_param::FlatParameter& parameter = flat.parameter;
  return placement(unit).shard->world_size() == 1 &&
         parameter.unsharded_dtype() == parameter.dtype() &&
         !RestsElsewhere(parameter.shard());
}

absl::Status Runtime::GatherFlat(int unit, Flat& flat) {
  c10::NoGradGuard no_grad;
  const flat_param::FlatParameter& parameter = flat.parameter;
  flat.memory_is_pooled = false;
  if (ShowsShard(unit, flat)) {
    const at::Tensor& shard = parameter.shard();
    flat.memory =
        RangeOf(shard, at::kByte, 0, static_cast<int64_t>(shard.nbytes()));
    return absl::OkStatus();
  }
  const bool fits = parameter.unsharded_dtype() == parameter.compute_dtype();
  if (flat.shared.defined() && fits) return GatherShared(unit, flat);
  const bool casts = parameter.unsharded_dtype() != parameter.dtype();
  if (!flat.part.defined() && (casts || RestsElsewhere(parameter.shard()))) {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor own, CopyOwnShard(flat));
    return StartAllGather(unit, flat, own);
  }
  FSDP_ASSIGN_OR_RETURN(flat.memory,
                        memory_.Acquire(parameter.unsharded_bytes()));
  flat.memory_is_pooled = true;
  if (!flat.part.defined()) {
    return StartAllGather(unit, flat, parameter.shard());
  }
  FSDP_ASSIGN_OR_RETURN(
      flat.gather, placement(unit).part->AllGather(
                       parameter.AsFlat(flat.memory), flat.part, flat.label));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> Runtime::CopyOwnShard(Flat& flat) {
  const flat_param::FlatParameter& parameter = flat.parameter;
  FSDP_ASSIGN_OR_RETURN(flat.memory,
                        memory_.Acquire(parameter.unsharded_bytes()));
  flat.memory_is_pooled = true;
  const flat_param::Slice range =
      parameter.layout().ShardRange(parameter.rank());
  at::Tensor own =
      RangeOf(parameter.AsFlat(flat.memory), range.begin, range.numel());
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(parameter.shard(), Use::kRead));
  own.copy_(parameter.shard());
  return own;
}

// Gathers into flat.memory, in which `own` may lie.
absl::Status Runtime::StartAllGather(int unit, Flat& flat,
                                     const at::Tensor& own) {
  const flat_param::FlatParameter& parameter = flat.parameter;
  if (placement(unit).shard->world_size() == 1) {
    flat.filled.Record(device());
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(flat.gather,
                        placement(unit).traffic().AllGather(
                            parameter.AsFlat(flat.memory), own, flat.label));
  order().Add(ActionKind::kGather, unit, flat.label,
              parameter.unsharded_bytes(), parameter.unsharded_dtype());
  return absl::OkStatus();
}

// Does nothing if the shared memory holds the shards. Otherwise each rank casts
// its own part into it, once for as long as the shards do not change.
absl::Status Runtime::GatherShared(int unit, Flat& flat) {
  const flat_param::FlatParameter& parameter = flat.parameter;
  flat.memory = flat.shared;
  const bool holds_shards = parameter.compute_dtype() == parameter.dtype();
  if (holds_shards || flat.shared_is_current) return absl::OkStatus();
  const at::Tensor whole = parameter.AsFlat(flat.memory);
  const flat_param::Slice range =
      parameter.layout().ShardRange(parameter.rank());
  const at::Tensor own = RangeOf(whole, range.begin, range.numel());
  own.copy_(parameter.shard());
  flat.shared_is_current = true;
  return StartAllGather(unit, flat, own);
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
    flat.parameter.Fill(flat.memory);
  }
  return absl::OkStatus();
}

void Runtime::Free(int unit) {
  for (Flat& flat : flats_[unit]) {
    flat.parameter.Empty();
    ReleaseMemory(flat);
  }
}

void Runtime::ReleaseMemory(Flat& flat) {
  if (flat.memory_is_pooled) memory_.Release(flat.memory);
  flat.memory.reset();
}

void Runtime::Shrink(int unit) {
  const comm::Communicator& group = *placement(unit).part;
  for (Flat& flat : flats_[unit]) {
    const at::Tensor whole = flat.parameter.AsFlat(flat.memory);
    const int64_t numel = whole.numel() / group.world_size();
    flat.part = RangeOf(whole, group.rank() * numel, numel).clone();
  }
  Free(unit);
}

std::vector<const void*> Runtime::Addresses(int unit) const {
  std::vector<const void*> addresses;
  for (const Flat& flat : flats_[unit]) {
    addresses.push_back(flat.memory.defined() ? flat.memory.const_data_ptr()
                                              : nullptr);
  }
  return addresses;
}

void Runtime::ForgetEarlierSteps() {
  memory_.ForgetUses();
  reducer_.ForgetEarlierSteps();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) flat.filled = DeviceEvent();
  }
}

void Runtime::ForkStreams() {
  stream_.FollowCurrentStream();
  reducer_.stream().FollowCurrentStream();
}

void Runtime::JoinStreams() {
  stream_.BlockCurrentStream();
  reducer_.stream().BlockCurrentStream();
}

void Runtime::BeginAlike() {
  reducer_.BeginAlike();
  memory_.SortFree();
}

// Discards memory of collectives in flight: a peer may still write to it.
void Runtime::DropEverything(bool sent) {
  reducer_.DropUnstepped();
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      flat.parameter.Empty();
      flat.shared_is_current = false;
      flat.part.reset();
      if (!flat.memory.defined()) continue;
      const bool in_flight = flat.gather != nullptr;
      if (in_flight) Forget(flat.gather);
      if (in_flight && sent) {
        if (flat.memory_is_pooled) memory_.Discard(flat.memory);
        flat.memory.reset();
      } else {
        ReleaseMemory(flat);
      }
    }
  }
  reducer_.DropEverything(sent);
  order().Clear();
}

void Runtime::SetPrecision(int unit, flat_param::Precision precision) {
  for (const RuntimeFlat& flat : flats(unit)) flat->SetPrecision(precision);
}

void Runtime::Abort(const absl::Status& reason) {
  communicator().Abort(reason);
  for (const RuntimeUnit& unit : units()) {
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
    const int unit = action.unit;
    const int64_t flag_reads =
        step_log_ == nullptr ? 0 : reducer_.flag_reads(unit);
    // LibTorch throws when memory runs out, and a user's hook may throw.
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        [&] {
          return absl::StrCat(Name(action.kind), " of unit ", name(unit));
        },
        [&] { return ExecuteOne(action, gradients); }));
    if (step_log_ == nullptr) continue;
    step_log_->push_back({action, Addresses(unit), reducer_.Addresses(unit),
                          reducer_.flag_reads(unit) > flag_reads});
  }
  return absl::OkStatus();
}

absl::Status Runtime::ExecuteOne(const Action& action,
                                 absl::Span<const at::Tensor> gradients) {
  const int unit = action.unit;
  RECORD_USER_SCOPE(
      absl::StrCat("fsdp::", Name(action.kind), "(", name(unit), ")"));
  switch (action.kind) {
    case ActionKind::kLoad:
      for (Flat& flat : flats_[unit]) PrefetchTensor(flat.parameter.shard());
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
      Shrink(unit);
      return absl::OkStatus();
    case ActionKind::kDropPart:
      for (Flat& flat : flats_[unit]) flat.part.reset();
      return absl::OkStatus();
    case ActionKind::kAccumulate:
      return reducer_.Accumulate(unit, gradients);
    case ActionKind::kFillReduceBuffer:
      return reducer_.FillReduceBuffer(unit, gradients);
    case ActionKind::kReduce:
      return reducer_.Reduce(unit);
    case ActionKind::kReplicate:
      return reducer_.Replicate(unit);
    case ActionKind::kKeepSums:
      return reducer_.KeepSums(unit);
    case ActionKind::kReplicateSums:
      return reducer_.ReplicateSums(unit);
    case ActionKind::kWaitReduce:
      return reducer_.WaitReduce(unit);
    case ActionKind::kStep:
      return reducer_.Step(unit);
    case ActionKind::kOpenShards:
      return OpenShards();
    case ActionKind::kCloseShards:
      return PassFences("waiting until no rank reads other ranks' shards");
  }
  return absl::InternalError("unknown action");
}

void Runtime::DropUnusedGradients() {
  if (step_log_ == nullptr && HasStreams(device())) {
    reducer_.DropUnusedGradients();
  }
}

std::vector<at::Tensor> Runtime::StepMemory() const {
  std::vector<at::Tensor> memory = memory_.free_buffers();
  for (at::Tensor& tensor : reducer_.StepMemory()) {
    memory.push_back(std::move(tensor));
  }
  return memory;
}

}  // namespace fsdp
