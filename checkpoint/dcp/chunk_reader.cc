#include "checkpoint/dcp/chunk_reader.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_reader.h"

namespace fsdp::checkpoint {
namespace {

absl::Status Bad(const DcpTensor& tensor, const DcpChunk& chunk,
                 absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", tensor.info.name, "\", its chunk at [",
                   absl::StrJoin(chunk.box.offsets, ", "), "]: ", why));
}

}  // namespace

absl::StatusOr<int64_t> FindChunkBytes(const DcpTensor& tensor,
                                       const DcpChunk& chunk,
                                       const ReadAt& read) {
  const absl::StatusOr<Value> value =
      ReadArchive(read, chunk.place.offset, chunk.place.length);
  if (!value.ok()) {
    // The device's own errors keep their code.
    const absl::Status bad = Bad(tensor, chunk, value.status().message());
    return absl::Status(value.status().code(), bad.message());
  }
  const ArchiveTensor* const stored = value->tensor();
  if (stored == nullptr) return Bad(tensor, chunk, "is no tensor");
  if (stored->dtype != tensor.info.dtype || stored->shape != chunk.box.sizes) {
    return Bad(
        tensor, chunk,
        absl::StrCat("has ", ToString({"", stored->dtype, stored->shape}),
                     " instead of ",
                     ToString({"", tensor.info.dtype, chunk.box.sizes})));
  }
  if (!stored->IsContiguous()) {
    return Bad(
        tensor, chunk,
        absl::StrCat("its strides [", absl::StrJoin(stored->strides, ", "),
                     "] are not row-major: save it with .contiguous()"));
  }
  return stored->FirstByte();
}

absl::StatusOr<Value> ReadDcpValue(const DcpPlace& place, const ReadAt& read) {
  return ReadArchive(read, place.offset, place.length);
}

}  // namespace fsdp::checkpoint
