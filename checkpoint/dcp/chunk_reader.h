// From the chunks of a DCP checkpoint to bytes of its files.
#ifndef CHECKPOINT_DCP_CHUNK_READER_H_
#define CHECKPOINT_DCP_CHUNK_READER_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/torch_archive/value.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {

// Where the elements of a chunk begin in its file: row-major, without gaps.
// `read` reads that file: two reads of 4 KiB. InvalidArgument, naming the
// tensor, for what is not the chunk that the metadata has, and for strides that
// are not row-major.
absl::StatusOr<int64_t> FindChunkBytes(const DcpTensor& tensor,
                                       const DcpChunk& chunk,
                                       const ReadAt& read);

// What is kept at the place of one of DcpMetadata::values.
absl::StatusOr<Value> ReadDcpValue(const DcpPlace& place, const ReadAt& read);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_CHUNK_READER_H_
