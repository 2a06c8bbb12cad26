#include "checkpoint/save/dcp_file_writer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/bytes/tensor_bytes.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/run/torch_dtype.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/crc32.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::checkpoint {
namespace {

// The bytes of the torch.save() file around one chunk, and in it, from first to
// last: its CRC is known when its elements have been read.
class ChunkBytes {
 public:
  // `source`: of what this rank has of the tensor, from element `begin` on.
  ChunkBytes(const DcpWriteTensor& tensor, const DcpFileChunk& chunk,
             const TensorSource* source, int64_t begin)
      : tensor_(tensor),
        chunk_(chunk),
        source_(source),
        skipped_((chunk.first - begin) * ItemBytes(tensor.info.dtype)),
        frame_(FrameDcpChunk(tensor, chunk, /*crc=*/0)) {}

  absl::Status Read(int64_t position, absl::Span<char> out) {
    int64_t at = chunk_.offset + position;
    const int64_t end = chunk_.payload + chunk_.bytes;
    while (!out.empty()) {
      size_t count = 0;
      if (at >= chunk_.payload && at < end) {
        count = std::min(out.size(), static_cast<size_t>(end - at));
        const absl::Span<char> part = out.first(count);
        FSDP_RETURN_IF_ERROR(
            source_->Read(skipped_ + at - chunk_.payload, part));
        crc_ = Crc32(absl::string_view(part.data(), part.size()), crc_);
        if (at + static_cast<int64_t>(count) == end) {
          frame_ = FrameDcpChunk(tensor_, chunk_, crc_);
        }
      } else {
        count = CopyFrame(at, out);
      }
      at += static_cast<int64_t>(count);
      out.remove_prefix(count);
    }
    return absl::OkStatus();
  }

 private:
  // Of the piece around the elements that has byte `at`.
  size_t CopyFrame(int64_t at, absl::Span<char> out) const {
    auto piece = std::upper_bound(
        frame_.begin(), frame_.end(), at,
        [](int64_t byte, const ArchivePiece& p) { return byte < p.offset; });
    --piece;
    const auto from = static_cast<size_t>(at - piece->offset);
    return piece->bytes.copy(out.data(), out.size(), from);
  }

  const DcpWriteTensor& tensor_;
  const DcpFileChunk& chunk_;
  const TensorSource* const source_;
  const int64_t skipped_;
  std::vector<ArchivePiece> frame_;
  uint32_t crc_ = 0;
};

absl::Status WriteChunks(const DcpRankFile& layout,
                         absl::Span<const DcpWriteTensor> tensors,
                         absl::Span<const TensorPart> parts,
                         RangeWriter& writer) {
  Resident held;
  int tensor = -1;
  std::optional<TensorSource> source;
  for (const DcpFileChunk& chunk : layout.chunks) {
    const auto index = static_cast<size_t>(chunk.tensor);
    const TensorPart& part = parts[index];
    if (tensor != chunk.tensor) {
      // Released once the next is held: parameters of a unit share memory.
      FSDP_ASSIGN_OR_RETURN(
          Resident next, Resident::Of(part.values, Use::kRead, Where::kHost));
      held = std::move(next);
      source.emplace(OnHost(part.values), *TorchDtype(part.info.dtype));
      tensor = chunk.tensor;
    }
    ChunkBytes bytes(tensors[index], chunk, &*source, part.begin);
    FSDP_RETURN_IF_ERROR(
        writer.Write(0, chunk.offset, chunk.length,
                     [&bytes](int64_t position, absl::Span<char> out) {
                       return bytes.Read(position, out);
                     }));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteDcpFile(FileSystem& files, const std::string& path,
                          const DcpRankFile& layout,
                          absl::Span<const DcpWriteTensor> tensors,
                          absl::Span<const TensorPart> parts,
                          const RangeWriterOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const auto writer,
                        RangeWriter::Create(files, {path}, options));
  FSDP_RETURN_IF_ERROR(writer->SetSize(0, layout.bytes));
  for (const DcpFileValue& value : layout.values) {
    FSDP_RETURN_IF_ERROR(writer->WriteBytes(0, value.offset, value.bytes));
  }
  FSDP_RETURN_IF_ERROR(WriteChunks(layout, tensors, parts, *writer));
  return writer->Finish().status();
}

}  // namespace fsdp::checkpoint
