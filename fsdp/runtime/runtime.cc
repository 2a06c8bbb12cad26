#include "fsdp/runtime/runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"

namespace fsdp {

Runtime::Runtime(std::shared_ptr<comm::Communicator> communicator,
                 std::vector<RuntimeUnit> units, absl::Duration timeout,
                 std::vector<std::unique_ptr<comm::Fence>> fences)
    : common_(std::move(communicator), std::move(units), timeout),
      gatherer_(common_, std::move(fences)),
      reducer_(common_) {}

// Memory goes back to the stream that allocated it, so that stream must follow
// what the other streams have been given.
Runtime::~Runtime() {
  // A failed device, which other calls report, has nothing to order.
  TorchToStatus("ordering the end of a model", [this] {
    gatherer_.JoinStream();
    gatherer_.ForkStream();
    reducer_.JoinStream();
    reducer_.ForkStream();
  }).IgnoreError();
}

void Runtime::SetPrecision(int unit, flat_param::Precision precision) {
  for (const auto& flat : flats(unit)) flat->SetPrecision(precision);
}

void Runtime::Abort(const absl::Status& reason) {
  communicator().Abort(reason);
  for (const RuntimeUnit& unit : common_.units()) {
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
    absl::Status status;
    status.Update(TorchToStatus(
        [&] {
          return absl::StrCat(Name(action.kind), " of unit ", name(unit));
        },
        [&] { status = ExecuteOne(action, gradients); }));
    FSDP_RETURN_IF_ERROR(status);
    if (step_log_ == nullptr) continue;
    step_log_->push_back({action, gatherer_.Addresses(unit),
                          reducer_.Addresses(unit),
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
      gatherer_.Load(unit);
      return absl::OkStatus();
    case ActionKind::kGather:
      return gatherer_.Gather(unit);
    case ActionKind::kGatherCopy:
      return gatherer_.GatherCopy(unit);
    case ActionKind::kWaitGather:
      return gatherer_.WaitGather(unit);
    case ActionKind::kFree:
      gatherer_.Free(unit);
      return absl::OkStatus();
    case ActionKind::kShrink:
      return gatherer_.Shrink(unit);
    case ActionKind::kDropPart:
      gatherer_.DropPart(unit);
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
      return gatherer_.OpenShards();
    case ActionKind::kCloseShards:
      return gatherer_.CloseShards();
  }
  return absl::InternalError("unknown action");
}

void Runtime::DropUnusedGradients() {
  if (step_log_ == nullptr && HasStreams(device())) {
    reducer_.DropUnusedGradients();
  }
}

void Runtime::DropEverything() {
  reducer_.DropUnstepped();
  gatherer_.DropEverything();
  reducer_.DropEverything();
  order().Clear();
}

std::vector<at::Tensor> Runtime::StepMemory() const {
  std::vector<at::Tensor> memory = gatherer_.StepMemory();
  for (at::Tensor& tensor : reducer_.StepMemory()) {
    memory.push_back(std::move(tensor));
  }
  return memory;
}

}  // namespace fsdp
