// Lays out DCP checkpoints that torch.distributed.checkpoint.load() reads: from
// names, shapes and ranges alone, before any byte of a tensor is there.
#ifndef CHECKPOINT_DCP_WRITER_H_
#define CHECKPOINT_DCP_WRITER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kDcpAlignment = 4096;
inline constexpr int64_t kDcpMaxChunkBytes = int64_t{256} << 20;

// A tensor of the whole checkpoint. Its name is DcpName(path).
struct DcpWriteTensor {
  TensorInfo info;
  DcpPath path;  // {"model", "layers.0.weight"}
};

// A value that is no tensor; one rank writes it.
struct DcpWriteValue {
  DcpPath path;  // {"optim", "param_groups", 0, "lr"}
  Value value;
};

// The elements of a tensor that a rank writes. A tensor without elements is
// written by the one rank that has {0, 0} of it.
struct DcpRange {
  int tensor = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// A chunk in a rank's file: a torch.save() file of one tensor. Chunks of a
// range are in memory order and back to back.
struct DcpFileChunk {
  int tensor = 0;
  Box box;
  int64_t first = 0;    // its first element, of the tensor's
  int64_t offset = 0;   // of the torch.save() file: a multiple of 4096
  int64_t length = 0;   // of the torch.save() file
  int64_t payload = 0;  // where its elements go, in the rank's file
  int64_t bytes = 0;    // of its elements
};

struct DcpFileValue {
  std::string name;
  int64_t offset = 0;
  std::string bytes;  // all of it
};

// Between these are gaps that nobody reads.
struct DcpRankFile {
  std::string name;  // "__3_0.distcp"
  std::vector<DcpFileValue> values;
  std::vector<DcpFileChunk> chunks;
  int64_t bytes = 0;
};

// Chunks have at most `max_chunk_bytes`, or one element. InvalidArgument for
// dtypes that PyTorch lacks and ranges that are none.
absl::StatusOr<DcpRankFile> LayOutDcpFile(
    int rank, absl::Span<const DcpWriteTensor> tensors,
    absl::Span<const DcpRange> ranges, absl::Span<const DcpWriteValue> values,
    int64_t max_chunk_bytes = kDcpMaxChunkBytes);

// What is around a chunk's elements, by the CRC32 (crc32.h) of these, on which
// only what comes behind them depends; offsets are in the rank's file.
std::vector<ArchivePiece> FrameDcpChunk(const DcpWriteTensor& tensor,
                                        const DcpFileChunk& chunk,
                                        uint32_t crc);

// `.metadata` of the files of all ranks; `values` are those of all ranks. Write
// it last: it is what makes the folder a checkpoint. InvalidArgument, naming
// the tensor, where the files do not have each element exactly once.
absl::StatusOr<std::string> DcpMetadataBytes(
    absl::Span<const DcpWriteTensor> tensors,
    absl::Span<const DcpWriteValue> values,
    absl::Span<const DcpRankFile> files);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_WRITER_H_
