#include "checkpoint/dcp/writer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {
namespace {

int64_t AlignUp(int64_t offset) {
  return (offset + kDcpAlignment - 1) / kDcpAlignment * kDcpAlignment;
}

absl::StatusOr<ArchiveLayout> LayOutChunk(Dtype dtype, const Box& box) {
  ArchiveTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = box.sizes;
  return ArchiveLayout::Create(Value{std::move(tensor)});
}

absl::Status AddChunk(const DcpWriteTensor& tensor, DcpFileChunk chunk,
                      DcpRankFile& file) {
  FSDP_ASSIGN_OR_RETURN(const ArchiveLayout layout,
                        LayOutChunk(tensor.info.dtype, chunk.box));
  chunk.offset = AlignUp(file.bytes);
  chunk.length = layout.bytes();
  chunk.payload = chunk.offset + layout.payloads()[0].offset;
  chunk.bytes = layout.payloads()[0].bytes;
  if (__builtin_add_overflow(chunk.offset, chunk.length, &file.bytes)) {
    return absl::InvalidArgumentError("a file of more than 2^63 bytes");
  }
  file.chunks.push_back(std::move(chunk));
  return absl::OkStatus();
}

absl::Status AddRange(const DcpWriteTensor& tensor, const DcpRange& range,
                      int64_t max_chunk_bytes, DcpRankFile& file) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  if (range.begin < 0 || range.begin > range.end || range.end > numel) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", tensor.info.name, "\" has no elements [",
                     range.begin, ", ", range.end, ")"));
  }
  DcpFileChunk chunk;
  chunk.tensor = range.tensor;
  if (numel == 0) {
    chunk.box = {std::vector<int64_t>(tensor.info.shape.size(), 0),
                 tensor.info.shape};
    return AddChunk(tensor, std::move(chunk), file);
  }
  const int64_t max_elements = std::max<int64_t>(
      1, max_chunk_bytes / std::max<int64_t>(1, ItemBytes(tensor.info.dtype)));
  chunk.first = range.begin;
  for (const Box& box :
       RangeToBoxes(tensor.info.shape, range.begin, range.end)) {
    for (Box& piece : SplitBox(tensor.info.shape, box, max_elements)) {
      chunk.box = std::move(piece);
      FSDP_RETURN_IF_ERROR(AddChunk(tensor, chunk, file));
      chunk.first += chunk.box.Numel();
    }
  }
  return absl::OkStatus();
}

absl::Status AddValue(const DcpWriteValue& value, DcpRankFile& file) {
  FSDP_ASSIGN_OR_RETURN(const ArchiveLayout layout,
                        ArchiveLayout::Create(value.value));
  if (!layout.payloads().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", DcpName(value.path),
                     "\" has tensors: give them as tensors of their own"));
  }
  std::vector<ArchivePiece> frame = layout.Frame({});
  FSDP_CHECK(frame.size() == 1);
  const int64_t offset = AlignUp(file.bytes);
  file.bytes = offset + layout.bytes();
  file.values.push_back(
      {DcpName(value.path), offset, std::move(frame[0].bytes)});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DcpRankFile> LayOutDcpFile(
    int rank, absl::Span<const DcpWriteTensor> tensors,
    absl::Span<const DcpRange> ranges, absl::Span<const DcpWriteValue> values,
    int64_t max_chunk_bytes) {
  FSDP_CHECK(max_chunk_bytes > 0);
  DcpRankFile file;
  file.name = absl::StrCat("__", rank, "_0.distcp");
  for (const DcpWriteValue& value : values) {
    FSDP_RETURN_IF_ERROR(AddValue(value, file));
  }
  for (const DcpRange& range : ranges) {
    FSDP_CHECK(range.tensor >= 0 &&
               static_cast<size_t>(range.tensor) < tensors.size());
    FSDP_RETURN_IF_ERROR(AddRange(tensors[static_cast<size_t>(range.tensor)],
                                  range, max_chunk_bytes, file));
  }
  return file;
}

std::vector<ArchivePiece> FrameDcpChunk(const DcpWriteTensor& tensor,
                                        const DcpFileChunk& chunk,
                                        uint32_t crc) {
  const absl::StatusOr<ArchiveLayout> layout =
      LayOutChunk(tensor.info.dtype, chunk.box);
  FSDP_CHECK(layout.ok());  // was laid out before
  std::vector<ArchivePiece> pieces = layout->Frame({crc});
  for (ArchivePiece& piece : pieces) piece.offset += chunk.offset;
  return pieces;
}

}  // namespace fsdp::checkpoint
