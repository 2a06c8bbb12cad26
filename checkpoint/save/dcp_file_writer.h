// One rank's file of a DCP checkpoint.
#ifndef CHECKPOINT_SAVE_DCP_FILE_WRITER_H_
#define CHECKPOINT_SAVE_DCP_FILE_WRITER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/run/tensor_parts.h"

namespace fsdp::checkpoint {

// Writes the values and chunks of `layout` to `path`, from first to last; it is
// on the disk then. `tensors` and `parts`, what this rank has of them, are by
// the same numbers. What rests elsewhere is in memory one unit at a time.
absl::Status WriteDcpFile(FileSystem& files, const std::string& path,
                          const DcpRankFile& layout,
                          absl::Span<const DcpWriteTensor> tensors,
                          absl::Span<const TensorPart> parts,
                          const RangeWriterOptions& options);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_DCP_FILE_WRITER_H_
