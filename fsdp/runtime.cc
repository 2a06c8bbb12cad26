#include "fsdp/runtime.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"

namespace fsdp {

Runtime::Runtime(std::shared_ptr<comm::Communicator> communicator,
                 std::vector<RuntimeUnit> units, absl::Duration timeout)
    : communicator_(std::move(communicator)),
      units_(std::move(units)),
      timeout_(timeout),
      parameter_memory_([c = communicator_.get()](int64_t bytes) {
        return c->AllocateSymmetric(bytes);
      }),
      gradient_memory_([c = communicator_.get()](int64_t bytes) {
        return c->AllocateSymmetric(bytes);
      }) {
  for (const RuntimeUnit& unit : units_) {
    std::vector<Flat>& flats = flats_.emplace_back();
    for (const auto& parameter : unit.flats) {
      std::string label = unit.name;
      if (unit.flats.size() > 1) {
        absl::StrAppend(&label, "/", c10::toString(parameter->dtype()));
      }
      flats.push_back({std::move(label), parameter.get(),
                       GradientBuffer(parameter.get()), at::Tensor(), nullptr});
    }
  }
}

absl::Status Runtime::Execute(absl::Span<const Action> actions,
                              absl::Span<const at::Tensor> gradients) {
  for (const Action& action : actions) {
    FSDP_RETURN_IF_ERROR(ExecuteOne(action, gradients));
  }
  return absl::OkStatus();
}

absl::Status Runtime::ExecuteOne(const Action& action,
                                 absl::Span<const at::Tensor> gradients) {
  switch (action.kind) {
    case ActionKind::kGather:
      return Gather(action.unit);
    case ActionKind::kWaitGather:
      return WaitGather(action.unit);
    case ActionKind::kFree:
      Free(action.unit);
      return absl::OkStatus();
    case ActionKind::kFillReduceBuffer:
      return FillReduceBuffer(action.unit, gradients);
    case ActionKind::kReduce:
      return Reduce(action.unit);
    case ActionKind::kWaitReduce:
      return WaitReduce(action.unit);
  }
  return absl::InternalError("unknown action");
}

absl::Status Runtime::Gather(int unit) {
  for (Flat& flat : flats_[unit]) {
    FSDP_CHECK(!flat.memory.defined());
    FSDP_ASSIGN_OR_RETURN(flat.memory, parameter_memory_.Acquire(
                                           flat.parameter->unsharded_bytes()));
    FSDP_ASSIGN_OR_RETURN(
        flat.gather,
        communicator_->AllGather(flat.parameter->AsFlat(flat.memory),
                                 flat.parameter->shard(), flat.label));
  }
  return absl::OkStatus();
}

absl::Status Runtime::WaitGather(int unit) {
  for (Flat& flat : flats_[unit]) {
    FSDP_RETURN_IF_ERROR(flat.gather->Wait(Deadline()));
    flat.gather.reset();
    flat.parameter->Fill(flat.memory);
  }
  return absl::OkStatus();
}

void Runtime::Free(int unit) {
  for (Flat& flat : flats_[unit]) {
    flat.parameter->Empty();
    parameter_memory_.Release(flat.memory);
    flat.memory.reset();
  }
}

absl::Status Runtime::FillReduceBuffer(int unit,
                                       absl::Span<const at::Tensor> gradients) {
  Reduction reduction{unit, {}, {}};
  size_t first = 0;
  for (Flat& flat : flats_[unit]) {
    FSDP_ASSIGN_OR_RETURN(at::Tensor memory, gradient_memory_.Acquire(
                                                 flat.gradient_buffer.bytes()));
    const size_t count = flat.parameter->num_parameters();
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        absl::StrCat("copying the gradients of unit ", flat.label), [&] {
          flat.gradient_buffer.Fill(memory, gradients.subspan(first, count));
        }));
    first += count;
    reduction.memory.push_back(std::move(memory));
  }
  reductions_.push_back(std::move(reduction));
  return absl::OkStatus();
}

absl::Status Runtime::Reduce(int unit) {
  Reduction& reduction = reductions_.back();
  FSDP_CHECK(reduction.unit == unit && reduction.works.empty());
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    const Flat& flat = flats_[unit][i];
    const at::Tensor& memory = reduction.memory[i];
    FSDP_ASSIGN_OR_RETURN(
        reduction.works.emplace_back(),
        communicator_->ReduceScatter(flat.gradient_buffer.OwnSegment(memory),
                                     flat.gradient_buffer.Whole(memory),
                                     comm::ReduceOp::kSum, flat.label));
  }
  return absl::OkStatus();
}

absl::Status Runtime::WaitReduce(int unit) {
  FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
  Reduction& reduction = reductions_.front();
  for (size_t i = 0; i < flats_[unit].size(); ++i) {
    Flat& flat = flats_[unit][i];
    FSDP_RETURN_IF_ERROR(reduction.works[i]->Wait(Deadline()));
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        absl::StrCat("accumulating the gradients of unit ", flat.label),
        [&] { flat.gradient_buffer.AccumulateMean(reduction.memory[i]); }));
    gradient_memory_.Release(reduction.memory[i]);
    reduction.memory[i].reset();
  }
  reductions_.pop_front();
  return absl::OkStatus();
}

// Memory of collectives in flight is discarded, not reused: a peer may still
// write it.
void Runtime::DropEverything() {
  for (std::vector<Flat>& flats : flats_) {
    for (Flat& flat : flats) {
      flat.parameter->Empty();
      if (!flat.memory.defined()) continue;
      if (flat.gather != nullptr) {
        parameter_memory_.Discard(flat.memory);
        flat.gather.reset();
      } else {
        parameter_memory_.Release(flat.memory);
      }
      flat.memory.reset();
    }
  }
  for (Reduction& reduction : reductions_) {
    for (const at::Tensor& memory : reduction.memory) {
      if (memory.defined()) gradient_memory_.Discard(memory);
    }
  }
  reductions_.clear();
}

}  // namespace fsdp
