// Says what a sharded model looks like and what it will need, before it runs.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp {
namespace {

constexpr double kMiB = 1 << 20;

const char* Short(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return "fp32";
    case c10::kDouble:
      return "fp64";
    case c10::kHalf:
      return "fp16";
    case c10::kBFloat16:
      return "bf16";
    default:
      return c10::toString(dtype);
  }
}

// Returns the trainable bytes of this rank's shard; alignment counts only if
// nothing is frozen.
int64_t TrainableBytes(const flat_param::FlatParameter& flat) {
  int64_t trainable = 0;
  int64_t frozen = 0;
  bool any = false;
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const at::Tensor& slice = flat.ShardSlice(i);
    any |= slice.requires_grad();
    (slice.requires_grad() ? trainable : frozen) +=
        static_cast<int64_t>(slice.nbytes());
  }
  if (!any) return 0;
  return frozen == 0 ? static_cast<int64_t>(flat.shard().nbytes()) : trainable;
}

bool OptimizerRestsElsewhere(const flat_param::FlatParameter& flat) {
  const RestingMemory* const memory = RestingMemory::Of(flat.shard());
  return memory != nullptr && memory->space()->OptimizerRestsElsewhere(*memory);
}

struct MessageBytes {
  int64_t gather = 0;
  int64_t reduce = 0;

  std::string ToString() const {
    if (gather == 0 && reduce == 0) return "";
    return absl::StrCat(" int8", gather > 0 ? " gathers" : "",
                        gather > 0 && reduce > 0 ? " and" : "",
                        reduce > 0 ? " sums" : "");
  }
};

// Returns zeros if nothing is quantized.
MessageBytes MessagesOf(const Runtime& runtime, int unit, int i) {
  const Placement& placement = runtime.placement(unit);
  if (placement.quantized == nullptr) return {};
  const flat_param::FlatParameter& flat = *runtime.flats(unit)[i];
  const c10::ScalarType reduce = runtime.flats(unit)[i].gradients.reduce_dtype;
  const int ranks = placement.shard->world_size();
  MessageBytes bytes;
  bytes.gather = comm::GatherMessageBytes(flat.layout().shard_numel(),
                                          flat.compute_dtype(), ranks,
                                          placement.quantization);
  const int64_t segment = runtime.reducer().reduce_buffer_bytes(unit, i) /
                          ranks /
                          static_cast<int64_t>(c10::elementSize(reduce));
  if (segment > 0) {
    bytes.reduce =
        comm::SumMessageBytes(segment, reduce, ranks, placement.quantization);
  }
  return bytes;
}

UnitBytes BytesOf(const ShardedModel& model, int unit) {
  const Runtime& runtime = model.runtime();
  const Reducer& reducer = runtime.reducer();
  const Placement& placement = runtime.placement(unit);
  const int ranks = placement.shard->world_size();
  UnitBytes bytes;
  bytes.trainable = false;
  bytes.takes_gradients = true;
  bytes.synchronizes = model.schedule().synchronizes(unit);
  bytes.all_reduces = model.schedule().all_reduces(unit);
  const auto num_flats = static_cast<int>(runtime.flats(unit).size());
  for (int i = 0; i < num_flats; ++i) {
    const flat_param::FlatParameter& flat = *runtime.flats(unit)[i];
    const MessageBytes messages = MessagesOf(runtime, unit, i);
    bytes.gather_messages += messages.gather;
    bytes.reduce_messages += messages.reduce;
    const auto shard = static_cast<int64_t>(flat.shard().nbytes());
    const bool away = RestsElsewhere(flat.shard());
    (away ? bytes.away : bytes.shard) += shard;
    bytes.stateless +=
        OptimizerRestsElsewhere(flat) ? shard : shard - TrainableBytes(flat);
    const bool is_shard =
        ranks == 1 && !away && flat.compute_dtype() == flat.dtype();
    // All ranks may compute with one copy, in which their shards may rest.
    if (runtime.flats(unit)[i].shared.defined()) {
      if (flat.compute_dtype() != flat.dtype()) {
        bytes.copy += flat.unsharded_bytes() / ranks;
      }
    } else if (!is_shard) {
      bytes.unsharded.push_back(flat.unsharded_bytes());
    }
    if (placement.part != nullptr) {
      bytes.part += flat.unsharded_bytes() / placement.part->world_size();
    }
    const int64_t gradient = reducer.shard_gradient_bytes(unit, i);
    if (gradient == 0) continue;
    bytes.trainable = true;
    const GradientBufferOptions& gradients = runtime.flats(unit)[i].gradients;
    bytes.takes_gradients &= flat.compute_dtype() == gradients.gradient_dtype &&
                             reducer.TakesGradients(unit, i);
    bytes.reduce_buffers.push_back(reducer.reduce_buffer_bytes(unit, i));
    if (gradients.memory == nullptr) bytes.gradient += gradient;
  }
  bytes.ranks = ranks;
  return bytes;
}

// Writes one line per flat parameter; the first has the unit's name.
std::string DescribeUnit(const ShardedModel& model, int unit) {
  const Runtime& runtime = model.runtime();
  int depth = 0;
  for (int i = model.parent(unit); i >= 0; i = model.parent(i)) ++depth;
  std::string name =
      absl::StrCat(std::string(size_t{2} * depth, ' '), runtime.name(unit));
  std::string strategy = ToString(model.strategy(unit));
  std::string text;
  const auto num_flats = static_cast<int>(runtime.flats(unit).size());
  for (int i = 0; i < num_flats; ++i) {
    const flat_param::FlatParameter& flat = *runtime.flats(unit)[i];
    absl::StrAppendFormat(
        &text, "%-32s %-29s %10d %12.2f %12.2f  %s/%s/%s%s%s%s\n", name,
        strategy, flat.num_parameters(),
        static_cast<double>(flat.unsharded_bytes()) / kMiB,
        static_cast<double>(flat.shard().nbytes()) / kMiB, Short(flat.dtype()),
        Short(flat.compute_dtype()),
        Short(runtime.flats(unit)[i].gradients.reduce_dtype),
        runtime.reducer().shard_gradient_bytes(unit, i) > 0 ? "" : " frozen",
        MessagesOf(runtime, unit, i).ToString(),
        model.recomputes(unit) ? " recomputed" : "");
    name.clear();
    strategy.clear();
  }
  if (text.empty()) {
    absl::StrAppendFormat(&text, "%-32s %-29s %10d\n", name, strategy, 0);
  }
  return text;
}

MemoryPlan PlanFor(const ShardedModel& model,
                   const MemoryPlanOptions& options = MemoryPlanOptions()) {
  std::vector<UnitBytes> bytes;
  bytes.reserve(model.num_units());
  for (int unit = 0; unit < model.num_units(); ++unit) {
    bytes.push_back(BytesOf(model, unit));
  }
  MemoryPlan plan = PlanMemory(model.schedule().units(), bytes,
                               model.schedule().options(), options);
  if (model.offload() != nullptr) {
    plan.transfers = model.offload()->plan().transfer_bytes;
  }
  return plan;
}

}  // namespace

MemoryPlan ShardedModuleBase::PlanMemory(
    const MemoryPlanOptions& options) const {
  return PlanFor(*model_, options);
}

std::string ShardedModuleBase::Describe() const {
  return fsdp::Describe(*model_);
}

std::string Describe(const ShardedModel& model) {
  std::string text = absl::StrFormat("%-32s %-29s %10s %12s %12s  %s\n", "unit",
                                     "strategy", "parameters", "whole MiB",
                                     "shard MiB", "stored/computed/reduced in");
  for (int unit = 0; unit < model.num_units(); ++unit) {
    absl::StrAppend(&text, DescribeUnit(model, unit));
  }
  absl::StrAppend(&text, PlanFor(model).ToString());
  if (model.offload() != nullptr) {
    absl::StrAppend(&text, model.offload()->Describe());
  }
  return text;
}

}  // namespace fsdp
