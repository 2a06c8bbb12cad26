#include "fsdp/runtime/reduction_calls.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/runtime/gradient_layout.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

ReductionCalls::ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks)
    : common_(common), hooks_(hooks) {
  for (const RuntimeUnit& unit : common_.units()) {
    labels_.emplace_back(unit.flats.size());
  }
}

// Returns a label that names the set of trained parameters. Ranks with
// different sets may have segments of one length, so groups compare labels.
const std::string& ReductionCalls::Label(int unit, size_t i,
                                         const GradientLayout& layout) {
  const std::vector<bool>& trained = layout.trained();
  const int count = layout.num_flags();
  const std::string& whole = common_.label(unit, i);
  if (count == static_cast<int>(trained.size())) return whole;
  std::string& label = labels_[unit][i][trained];
  if (!label.empty()) return label;
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const bool is_trained : trained) {
    hash = (hash ^ (is_trained ? 1 : 0)) * 0x100000001b3;
  }
  const auto& parameter = *common_.units()[unit].flats[i];
  label = absl::StrCat(
      whole, " (trains ", count, " of ", trained.size(), " parameters, ",
      absl::Hex(hash, absl::kZeroPad16), ", first ",
      parameter.parameter(layout.parameters().front()).name, ")");
  return label;
}

absl::StatusOr<ReductionCalls::ReduceScatter>
ReductionCalls::StartReduceScatter(int unit, size_t i,
                                   const GradientBuffer& gradients,
                                   const ReduceBuffer& buffer,
                                   ShardGradient* direct) {
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReduce, unit, label, buffer.layout->bytes(),
                      gradients.options().reduce_dtype);
  const at::Tensor own = gradients.OwnSegment(buffer);
  const at::Tensor whole = gradients.Whole(buffer);
  const Placement& placement = common_.placement(unit);
  ReduceScatter started;
  if (hooks_.reduce_scatter) {
    FSDP_ASSIGN_OR_RETURN(
        started.work, hooks_.reduce_scatter({common_.label(unit, i),
                                             *placement.shard, whole, own}));
    return started;
  }
  std::optional<ShardGradient::DirectTarget> target;
  if (direct != nullptr) {
    FSDP_ASSIGN_OR_RETURN(target, direct->StartDirect(buffer.layout));
  }
  if (target) {
    started.is_direct = true;
    FSDP_ASSIGN_OR_RETURN(started.work,
                          placement.traffic().ReduceScatterScaled(
                              target->out, whole, target->sum, label));
  } else {
    FSDP_ASSIGN_OR_RETURN(started.work,
                          placement.traffic().ReduceScatter(
                              own, whole, comm::ReduceOp::kSum, label));
  }
  return started;
}

absl::StatusOr<std::unique_ptr<comm::Work>> ReductionCalls::StartAllReduce(
    int unit, size_t i, const GradientBuffer& gradients,
    const ReduceBuffer& buffer) {
  comm::Communicator& group = *common_.placement(unit).replicate;
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReplicate, unit, label,
                      buffer.layout->bytes(), gradients.options().reduce_dtype);
  const at::Tensor own = gradients.OwnSegment(buffer);
  if (hooks_.all_reduce) {
    return hooks_.all_reduce({common_.label(unit, i), group, own});
  }
  return group.AllReduce(own, comm::ReduceOp::kSum, label);
}

absl::Status ReduceMemory::Collect(const GradientBuffer& of,
                                   absl::Span<const at::Tensor> gradients,
                                   const GradientBuffer::Layout& layout,
                                   ShardGradient* taker, ReduceBuffer& buffer) {
  FSDP_RETURN_IF_ERROR(LayOut(of, layout, buffer));
  if (layout == nullptr || gradients.empty()) return absl::OkStatus();
  if (buffer.has_gradients()) {
    of.Add(buffer, gradients);
    return absl::OkStatus();
  }
  // One step's gradient becomes the next one's buffer, on the same stream.
  if (taker != nullptr) {
    const at::Tensor unused = taker->GiveUnused();
    if (unused.defined()) pool_.Adopt(unused, DeviceEvent());
  }
  FSDP_ASSIGN_OR_RETURN(buffer.memory, pool_.Acquire(layout->bytes()));
  of.Fill(buffer, gradients);
  return absl::OkStatus();
}

// Gives `buffer` the layout `layout` and keeps its gradients.
absl::Status ReduceMemory::LayOut(const GradientBuffer& of,
                                  const GradientBuffer::Layout& layout,
                                  ReduceBuffer& buffer) {
  const bool is_same = buffer.layout == layout ||
                       (buffer.layout != nullptr && layout != nullptr &&
                        buffer.layout->trained() == layout->trained());
  if (is_same) return absl::OkStatus();
  ReduceBuffer next = {layout, {}};
  if (buffer.has_gradients() && layout != nullptr) {
    FSDP_ASSIGN_OR_RETURN(next.memory, pool_.Acquire(layout->bytes()));
    of.Convert(buffer, next);
  }
  if (buffer.has_gradients()) pool_.Release(buffer.memory);
  buffer = std::move(next);
  return absl::OkStatus();
}

absl::Status ReduceMemory::AddToSums(const GradientBuffer& of,
                                     const ReduceBuffer& buffer,
                                     ReduceBuffer& sums) {
  const bool has_sums = sums.has_gradients();
  if (!has_sums || sums.layout->trained() != buffer.layout->trained()) {
    ReduceBuffer next;
    next.layout = has_sums ? of.CurrentLayout(sums.layout) : buffer.layout;
    next.is_segment = true;
    FSDP_ASSIGN_OR_RETURN(next.memory,
                          pool_.Acquire(next.layout->segment_bytes()));
    of.Convert(has_sums ? sums : buffer, next);
    if (has_sums) Release(sums, /*reader=*/nullptr);
    sums = std::move(next);
    if (!has_sums) return absl::OkStatus();
  }
  of.AddSegment(buffer, sums);
  return absl::OkStatus();
}

void ReduceMemory::Release(ReduceBuffer& buffer,
                           std::unique_ptr<comm::Work> reader) {
  DeviceEvent read;
  read.Record(device_);
  BufferPool::AwaitReader await_reader;
  if (reader != nullptr) {
    await_reader = [reader = std::move(reader)] {
      return reader->BlockCurrentStream();
    };
  }
  pool_.Release(buffer.memory, std::move(await_reader), std::move(read));
  buffer.memory.reset();
}

void ReduceMemory::DropKept(ReduceBuffer& buffer) {
  if (buffer.has_gradients()) pool_.Release(buffer.memory);
  buffer = ReduceBuffer();
}

void ReduceMemory::Adopt(const at::Tensor& memory) {
  if (!memory.defined()) return;
  DeviceEvent used;
  used.Record(device_);
  pool_.Adopt(memory, std::move(used));
}

}  // namespace fsdp
