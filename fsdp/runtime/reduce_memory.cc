#include "fsdp/runtime/reduce_memory.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/runtime/gradient_layout.h"

namespace fsdp {

absl::Status ReduceMemory::Collect(const GradientBuffer& of,
                                   absl::Span<const at::Tensor> gradients,
                                   const GradientBuffer::Layout& layout,
                                   ShardGradient* taker, ReduceBuffer& buffer) {
  // Gives the buffer the layout, and keeps its gradients.
  const bool is_same = buffer.layout == layout ||
                       (buffer.layout != nullptr && layout != nullptr &&
                        buffer.layout->trained() == layout->trained());
  if (!is_same) {
    ReduceBuffer next = {layout, {}};
    if (buffer.has_gradients() && layout != nullptr) {
      FSDP_ASSIGN_OR_RETURN(next.memory, pool_.Acquire(layout->bytes()));
      of.Convert(buffer, next);
    }
    DropKept(buffer);
    buffer = std::move(next);
  }
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
