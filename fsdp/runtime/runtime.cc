#include "fsdp/runtime/runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/gatherer.h"
#include "fsdp/runtime/reducer.h"

namespace fsdp {

Runtime::Runtime(std::shared_ptr<comm::Communicator> communicator,
                 std::vector<RuntimeUnit> units, absl::Duration timeout,
                 std::vector<std::unique_ptr<comm::Fence>> fences)
    : common_(std::move(communicator), std::move(units), timeout),
      gatherer_(std::make_unique<Gatherer>(common_, std::move(fences))),
      reducer_(std::make_unique<Reducer>(common_)) {}

// Memory goes back to the stream that allocated it, so that stream must follow
// what the other streams have been given.
Runtime::~Runtime() {
  // A failed device, which other calls report, has nothing to order.
  TorchToStatus("ordering the end of a model", [this] {
    gatherer_->JoinStream();
    gatherer_->ForkStream();
    reducer_->JoinStream();
    reducer_->ForkStream();
  }).IgnoreError();
}

bool Runtime::HoldsCopy(int unit) const { return gatherer_->HoldsCopy(unit); }

int64_t Runtime::reduce_buffer_bytes(int unit) const {
  return reducer_->reduce_buffer_bytes(unit);
}

int64_t Runtime::reduce_buffer_bytes(int unit, int i) const {
  return reducer_->gradient_buffer(unit, i).bytes();
}

int64_t Runtime::shard_gradient_bytes(int unit, int i) const {
  return reducer_->gradient_buffer(unit, i).shard_bytes();
}

bool Runtime::TakesGradients(int unit, int i) const {
  return reducer_->TakesGradients(unit, i);
}

const SharedFlat& Runtime::shared(int unit, int i) const {
  return gatherer_->shared(unit, i);
}

void Runtime::SetHooks(RuntimeHooks hooks) {
  reducer_->SetHooks(std::move(hooks));
}

const RuntimeHooks& Runtime::hooks() const { return reducer_->hooks(); }

void Runtime::SetGradientScaling(GradientScaling scaling) {
  reducer_->SetScaling(scaling);
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
    // LibTorch throws when memory runs out, and a user's hook may throw.
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
  const int64_t flag_reads = reducer_->flag_reads(action.unit);
  FSDP_RETURN_IF_ERROR(ExecuteOne(action, gradients));
  step_log_->push_back(RecordOf(action));
  step_log_->back().read_flags = reducer_->flag_reads(action.unit) > flag_reads;
  return absl::OkStatus();
}

StepRecord Runtime::RecordOf(const Action& action) const {
  return {action, gatherer_->Addresses(action.unit),
          reducer_->Addresses(action.unit)};
}

absl::Status Runtime::ExecuteOne(const Action& action,
                                 absl::Span<const at::Tensor> gradients) {
  const int unit = action.unit;
  RECORD_USER_SCOPE(
      absl::StrCat("fsdp::", Name(action.kind), "(", name(unit), ")"));
  switch (action.kind) {
    case ActionKind::kLoad:
      gatherer_->Load(unit);
      return absl::OkStatus();
    case ActionKind::kGather:
      return gatherer_->Gather(unit);
    case ActionKind::kGatherCopy:
      return gatherer_->GatherCopy(unit);
    case ActionKind::kWaitGather:
      return gatherer_->WaitGather(unit);
    case ActionKind::kFree:
      gatherer_->Free(unit);
      return absl::OkStatus();
    case ActionKind::kShrink:
      return gatherer_->Shrink(unit);
    case ActionKind::kDropPart:
      gatherer_->DropPart(unit);
      return absl::OkStatus();
    case ActionKind::kAccumulate:
      return reducer_->Accumulate(unit, gradients);
    case ActionKind::kFillReduceBuffer:
      return reducer_->FillReduceBuffer(unit, gradients);
    case ActionKind::kReduce:
      return reducer_->Reduce(unit);
    case ActionKind::kReplicate:
      return reducer_->Replicate(unit);
    case ActionKind::kKeepSums:
      return reducer_->KeepSums(unit);
    case ActionKind::kReplicateSums:
      return reducer_->ReplicateSums(unit);
    case ActionKind::kWaitReduce:
      return reducer_->WaitReduce(unit);
    case ActionKind::kStep:
      return reducer_->Step(unit);
    case ActionKind::kOpenShards:
      return gatherer_->OpenShards();
    case ActionKind::kCloseShards:
      return gatherer_->CloseShards();
  }
  return absl::InternalError("unknown action");
}

void Runtime::EndOfBackward() { reducer_->EndOfBackward(); }

void Runtime::DropUnusedGradients() {
  if (step_log_ == nullptr && HasStreams(device())) {
    reducer_->DropUnusedGradients();
  }
}

void Runtime::DropWholeGradients() { reducer_->DropWholeGradients(); }

void Runtime::FinishReductions(absl::FunctionRef<bool(int unit)> all_reduces) {
  reducer_->FinishReductions(all_reduces);
}

void Runtime::DropEverything() {
  reducer_->DropUnstepped();
  gatherer_->DropEverything();
  reducer_->DropEverything();
  order().Clear();
}

bool Runtime::HasWholeGradients(int unit) const {
  return reducer_->HasWholeGradients(unit);
}

bool Runtime::HasSums(int unit) const { return reducer_->HasSums(unit); }

void Runtime::ForgetEarlierSteps() {
  gatherer_->ForgetEarlierSteps();
  reducer_->ForgetEarlierSteps();
}

void Runtime::ForkStreams() {
  gatherer_->ForkStream();
  reducer_->ForkStream();
}

void Runtime::JoinStreams() {
  gatherer_->JoinStream();
  reducer_->JoinStream();
}

void Runtime::BeginAlike() {
  reducer_->BeginAlike();
  gatherer_->BeginAlike();
}

std::vector<at::Tensor> Runtime::StepMemory() const {
  std::vector<at::Tensor> memory = gatherer_->StepMemory();
  for (at::Tensor& tensor : reducer_->StepMemory()) {
    memory.push_back(std::move(tensor));
  }
  return memory;
}

MemoryStats Runtime::memory_stats() const {
  return {gatherer_->memory_stats(), reducer_->memory_stats()};
}

}  // namespace fsdp
