#include "fsdp/describe/describe.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/model_view.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/resting/offload_space.h"

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
MessageBytes MessagesOf(const UnitView& unit, const FlatView& view) {
  if (!unit.quantization.has_value()) return {};
  const flat_param::FlatParameter& flat = *view.flat;
  const c10::ScalarType reduce = view.reduce_dtype;
  MessageBytes bytes;
  bytes.gather = comm::GatherMessageBytes(flat.layout().shard_numel(),
                                          flat.compute_dtype(), unit.ranks,
                                          *unit.quantization);
  const int64_t segment = view.reduce_buffer_bytes / unit.ranks /
                          static_cast<int64_t>(c10::elementSize(reduce));
  if (segment > 0) {
    bytes.reduce =
        comm::SumMessageBytes(segment, reduce, unit.ranks, *unit.quantization);
  }
  return bytes;
}

UnitBytes BytesOf(const UnitView& unit) {
  UnitBytes bytes;
  bytes.trainable = false;
  bytes.takes_gradients = true;
  bytes.synchronizes = unit.synchronizes;
  bytes.all_reduces = unit.all_reduces;
  for (const FlatView& view : unit.flats) {
    const flat_param::FlatParameter& flat = *view.flat;
    const MessageBytes messages = MessagesOf(unit, view);
    bytes.gather_messages += messages.gather;
    bytes.reduce_messages += messages.reduce;
    const auto shard = static_cast<int64_t>(flat.shard().nbytes());
    const bool away = RestsElsewhere(flat.shard());
    (away ? bytes.away : bytes.shard) += shard;
    bytes.stateless +=
        OptimizerRestsElsewhere(flat) ? shard : shard - TrainableBytes(flat);
    const bool is_shard =
        unit.ranks == 1 && !away && flat.compute_dtype() == flat.dtype();
    if (view.is_shared) {
      if (!view.shares_shards) {
        bytes.copy += flat.unsharded_bytes() / unit.ranks;
      }
    } else if (!is_shard) {
      bytes.unsharded += flat.unsharded_bytes();
      bytes.unsharded_parts.push_back(flat.unsharded_bytes());
    }
    if (unit.part_ranks > 0) {
      bytes.part += flat.unsharded_bytes() / unit.part_ranks;
    }
    if (view.shard_gradient_bytes == 0) continue;
    bytes.trainable = true;
    const bool computes_in_dtype_of_gradients =
        flat.compute_dtype() == view.gradient_dtype;
    bytes.takes_gradients &=
        computes_in_dtype_of_gradients && view.takes_gradients;
    bytes.reduce_parts.push_back(view.reduce_buffer_bytes);
    if (view.gradient_is_placed) continue;
    bytes.gradient += view.shard_gradient_bytes;
  }
  bytes.reduce_buffer = unit.reduce_buffer_bytes;
  bytes.segment = bytes.reduce_buffer / unit.ranks;
  return bytes;
}

// Writes one line per flat parameter; the first has the unit's name.
std::string DescribeUnit(const std::vector<UnitView>& units, int index) {
  const UnitView& unit = units[index];
  int depth = 0;
  for (int i = unit.parent; i >= 0; i = units[i].parent) ++depth;
  std::string name =
      absl::StrCat(std::string(size_t{2} * depth, ' '), unit.name);
  std::string strategy = ToString(unit.strategy);
  std::string text;
  for (const FlatView& view : unit.flats) {
    const flat_param::FlatParameter& flat = *view.flat;
    absl::StrAppendFormat(
        &text, "%-32s %-29s %10d %12.2f %12.2f  %s/%s/%s%s%s%s\n", name,
        strategy, flat.num_parameters(),
        static_cast<double>(flat.unsharded_bytes()) / kMiB,
        static_cast<double>(flat.shard().nbytes()) / kMiB, Short(flat.dtype()),
        Short(flat.compute_dtype()), Short(view.reduce_dtype),
        view.shard_gradient_bytes > 0 ? "" : " frozen",
        MessagesOf(unit, view).ToString(),
        unit.recomputed ? " recomputed" : "");
    name.clear();
    strategy.clear();
  }
  if (text.empty()) {
    absl::StrAppendFormat(&text, "%-32s %-29s %10d\n", name, strategy, 0);
  }
  return text;
}

}  // namespace

MemoryPlan PlanMemory(const ShardedModel& model,
                      const MemoryPlanOptions& options) {
  const ModelView view = ViewOf(model);
  std::vector<UnitBytes> bytes;
  bytes.reserve(view.units.size());
  for (const UnitView& unit : view.units) bytes.push_back(BytesOf(unit));
  MemoryPlan plan =
      PlanMemory(view.scheduled_units, bytes, view.schedule_options, options);
  if (model.offload() != nullptr) {
    plan.transfers = model.offload()->plan().transfer_bytes;
  }
  return plan;
}

std::string Describe(const ShardedModel& model) {
  std::string text = absl::StrFormat("%-32s %-29s %10s %12s %12s  %s\n", "unit",
                                     "strategy", "parameters", "whole MiB",
                                     "shard MiB", "stored/computed/reduced in");
  const ModelView view = ViewOf(model);
  for (int unit = 0; unit < model.num_units(); ++unit) {
    absl::StrAppend(&text, DescribeUnit(view.units, unit));
  }
  absl::StrAppend(&text, PlanMemory(model).ToString());
  if (model.offload() != nullptr) {
    absl::StrAppend(&text, model.offload()->Describe());
  }
  return text;
}

}  // namespace fsdp
