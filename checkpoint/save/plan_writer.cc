#include "checkpoint/save/plan_writer.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/bytes/tensor_bytes.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::checkpoint {

absl::Status WriteHeads(const SavePlan& plan, RangeWriter& writer) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(index, plan.files[i].bytes));
    FSDP_RETURN_IF_ERROR(writer.WriteBytes(index, 0, plan.files[i].head));
  }
  return absl::OkStatus();
}

absl::Status WriteOwnHeads(const SavePlan& plan, RangeWriter& writer) {
  auto index = static_cast<int64_t>(plan.files.size());
  for (const SaveFile& file : plan.own) {
    FSDP_RETURN_IF_ERROR(writer.WriteBytes(index++, 0, file.head));
  }
  return absl::OkStatus();
}

absl::Status WriteLive(const SavePlan& plan, RangeWriter& writer) {
  Resident held;
  for (const SaveRange& range : plan.ranges) {
    // Released once the next is held: parameters of a unit share their memory.
    FSDP_ASSIGN_OR_RETURN(Resident next,
                          Resident::Of(range.values, Use::kRead, Where::kHost));
    held = std::move(next);
    const TensorSource source(OnHost(range.values), range.dtype);
    FSDP_RETURN_IF_ERROR(
        writer.Write(range.file, range.offset, range.bytes,
                     [&](int64_t position, absl::Span<char> out) {
                       return Annotate(source.Read(position, out), range.name);
                     }));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
